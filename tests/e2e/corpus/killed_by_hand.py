# headline: was killed by SIGKILL in generation
# next: none
# not: memory

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
