# headline: was killed by SIGFPE \(crashed in .*/train\.py:\d+ in divide\)
# next: native code
# slow

import faulthandler
import os
import signal

faulthandler.enable()


def divide():
    os.kill(os.getpid(), signal.SIGFPE)


divide()
