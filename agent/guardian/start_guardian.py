"""The guardian's first file, run as `python -I -S start_guardian.py KIN FD CGROUP`: see guardian.py.

A job starts now, and on few CPUs its workers would wait for this process's imports. So it waits until the agent says
that they are forked. A script is compiled at each start besides, and a module is not.
"""

import os
import select
import signal
import sys

# For the case that the workers come late: Python's own files may be gone at the agent's end.
_LATER_S = 1.0

# A scheduler signals all of a job's processes. The guardian ends only when its work is done.
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, signal.SIG_IGN)
# The agent has a word, or is gone.
select.select([int(sys.argv[2])], [], [], _LATER_S)
# At the end: the standard library's modules come first.
sys.path.append(os.path.dirname(__file__))  # noqa: PTH120

import guardian  # noqa: E402

guardian.main()
