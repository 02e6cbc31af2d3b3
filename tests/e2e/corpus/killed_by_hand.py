# headline: was killed by SIGKILL in generation
# next: find .*sender: .*kill -9
# not: out of memory|more memory

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
