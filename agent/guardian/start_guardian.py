"""The guardian's first file, run as `python -I -S start_guardian.py KIN FD CGROUP STDERR`: see guardian.py.

On few CPUs the workers of a job that starts would wait for the guardian's imports. So the guardian imports when the
agent says that all workers are forked, or after a minute. Python compiles a script at each start, a module only once.
"""

import importlib
import os
import select
import signal
import sys

# Not only at the agent's end: Python's own files may be gone then.
_LATER_MS = 60_000


def _is_nested() -> bool:
    """Whether the cgroup is that of another job of elaunch, whose end leaves this process only a moment to clean up."""
    try:
        with open("/proc/self/cgroup", "rb") as file:  # noqa: PTH123
            return b"/elaunch-" in file.read()
    except OSError:
        return False


def main() -> None:
    """Wait, then be the guardian."""
    # A scheduler signals all of a job's processes. The guardian ends only when its work is done.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    fd, said = int(sys.argv[2]), b""
    if not _is_nested():
        news = select.poll()
        news.register(fd, select.POLLIN)
        # Until workers run, or the agent is gone.
        while b'"workers"' not in said and news.poll(_LATER_MS) and (piece := os.read(fd, 4096)):
            said += piece
    # At the end: the standard library's modules come first.
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120
    importlib.import_module("guardian").main(said)


if __name__ == "__main__":
    main()
