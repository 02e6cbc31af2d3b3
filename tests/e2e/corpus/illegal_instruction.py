# headline: was killed by SIGILL
# next: built for another CPU
# slow

import os
import signal

os.kill(os.getpid(), signal.SIGILL)
