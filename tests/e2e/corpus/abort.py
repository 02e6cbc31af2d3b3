# headline: was killed by SIGABRT \(crashed in .*/train\.py:\d+ in step; std::runtime_error: bad tile\)
# next: none
# slow

import os
import sys


def step():
    sys.stderr.write("terminate called after throwing an instance of 'std::runtime_error'\n  what():  bad tile\n")
    os.abort()


step()
