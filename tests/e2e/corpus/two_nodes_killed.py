# nodes: 2
# headline: rank 1 .* was killed by SIGKILL in generation 0
# next: find .*sender: .*kill -9
# not: rank 0 \(.* (?:raised|was killed)|out of memory|more memory
# slow

import os
import signal

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
