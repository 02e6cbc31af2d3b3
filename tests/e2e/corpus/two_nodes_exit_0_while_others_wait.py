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
    Path(f"gone {generation}").symlink_to(str(os.getpid()))
    raise SystemExit
while not Path(f"gone {generation}").is_symlink():
    time.sleep(0.01)
# Until it is gone, and its parent knows that.
while Path("/proc", Path(f"gone {generation}").readlink()).exists():
    time.sleep(0.01)
raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
