"""The guardian's first file, run as `python -I -S start_guardian.py KIN FD CGROUP`: see guardian.py.

A job starts now, and on few CPUs its workers would wait for this process's imports. So it waits until the agent says
that they are forked. A script is compiled at each start besides, and a module is not.
"""

import importlib
import os
import select
import signal
import sys

# For the case that the workers come late: Python's own files may be gone at the agent's end.
_LATER_MS = 1000


def main() -> None:
    """Wait, then be the guardian."""
    # A scheduler signals all of a job's processes. The guardian ends only when its work is done.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    news = select.poll()
    news.register(int(sys.argv[2]), select.POLLIN)
    # The agent has a word, or is gone.
    news.poll(_LATER_MS)
    # At the end: the standard library's modules come first.
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120
    importlib.import_module("guardian").main()


if __name__ == "__main__":
    main()
