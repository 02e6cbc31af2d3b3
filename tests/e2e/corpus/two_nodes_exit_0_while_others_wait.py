# slow
# nodes: 2
# max-restarts: 1
# headline: rank 1 .*exit code 0
# next: .
# not: ^rank 0 \(|generation 2

import os
import time
from pathlib import Path

generation = os.environ["ELAUNCH_GENERATION"]
if os.environ["RANK"] == "1":
    Path(f"gone {generation}").touch()
    raise SystemExit
while not Path(f"gone {generation}").exists():
    time.sleep(0.01)
time.sleep(0.5)
raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
