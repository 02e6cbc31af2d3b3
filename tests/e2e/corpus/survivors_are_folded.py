# workers: 3
# options: --no-preload --failure-grace 300
# headline: rank 1 .* was killed by SIGKILL in generation 0
# next: find .*sender: .*kill -9
# not: Connection closed by peer
# slow

import os
import signal
import time
from pathlib import Path

rank = os.environ["RANK"]
if rank == "1":
    while not (Path("ready 0").exists() and Path("ready 2").exists()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def lost(*_):
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")


signal.signal(signal.SIGTERM, lost)
Path(f"ready {rank}").touch()
while True:
    signal.sigtimedwait([], 0.05)
