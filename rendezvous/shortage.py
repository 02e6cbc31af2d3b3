"""Resource limits of the host that elaunch itself has hit."""

from __future__ import annotations

import errno
import os
import resource


def shortage(error: BaseException) -> str | None:
    """The limit that caused `error`, and how to raise it; None for any other error."""

    def limit(kind: int) -> str:
        allowed, _ = resource.getrlimit(kind)
        return "unlimited" if allowed == resource.RLIM_INFINITY else str(allowed)

    number = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = errno.EAGAIN
    match number:
        # BlockingIOError of a non-blocking stream has the same number, and has characters_written.
        case errno.EAGAIN if not hasattr(error, "characters_written"):
            return (
                f"user {os.geteuid()} may start no more processes or threads here (ulimit -u is"
                f" {limit(resource.RLIMIT_NPROC)}, and a container has pids.max); raise the limit, or end other"
                " processes"
            )
        case errno.EMFILE:
            return (
                f"elaunch may open no more files (ulimit -n is {limit(resource.RLIMIT_NOFILE)});"
                " raise the limit: ulimit -n 4096"
            )
        case errno.ENFILE:
            return "this host may open no more files (fs.file-max); end other processes, or raise the limit as root"
        case errno.ENOMEM:
            return (
                f"there is no more memory for elaunch itself (ulimit -v is {limit(resource.RLIMIT_AS)}, and a container"
                " has memory.max); give it more, or end other processes"
            )
    return None
