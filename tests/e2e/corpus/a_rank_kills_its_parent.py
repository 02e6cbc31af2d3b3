# As some frameworks do, lest the others hang. Nothing says who has sent a SIGKILL.
# headline: the fork server was killed by SIGKILL on \S+ in generation 1
# why: it failed the same way twice in a row.*; 1 of 3 .*
# next: the fork server is the parent process of this node's ranks: .*SIGTERM
# max-restarts: 3
# workers: 2

import os
import signal
import sys

if os.environ["RANK"] == "1":
    print("fatal: shard 17 is not there", file=sys.stderr, flush=True)
    os.kill(os.getppid(), signal.SIGKILL)
signal.pause()
