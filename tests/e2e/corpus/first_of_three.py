# Three ranks fail, one after the other. The first one is the cause.
# workers: 3
# headline: rank 2 .* raised ValueError: the first
# next: none
# not: ^rank [01] \(|the cause: rank [01]
# slow

import os
import signal
import time
from pathlib import Path

rank = os.environ["RANK"]
if rank != "2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"ready {rank}").touch()
    while not Path("first").is_symlink():
        time.sleep(0.01)
    # Until it is gone, and its parent knows that.
    while Path("/proc", Path("first").readlink()).exists():
        time.sleep(0.01)
    raise KeyError(f"{rank} has the data of rank 2 no more")
while not (Path("ready 0").exists() and Path("ready 1").exists()):
    time.sleep(0.01)
Path("first").symlink_to(str(os.getpid()))
raise ValueError("the first")
