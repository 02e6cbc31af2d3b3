"""Linux calls that Python's standard library has no name for."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when `parent` ends; exits at once if it already has.

    Must be called by the main thread's process right after fork: the kernel forgets the wish at fork, not at exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def catches(pid: int, signum: int) -> bool:
    """Whether that process has a handler for the signal; not, where it is gone."""
    return _is_in(pid, "SigCgt", signum)


def is_pending(pid: int, signum: int) -> bool:
    """Whether that process was sent the signal and blocks it."""
    return _is_in(pid, "ShdPnd", signum)


def is_stopped(pid: int) -> bool:
    """Whether a SIGSTOP or a debugger holds that process; not, where it is gone."""
    return _status(pid, "State")[:1] in ("T", "t")


def _is_in(pid: int, field: str, signum: int) -> bool:
    return bool(int(_status(pid, field) or "0", 16) >> (signum - 1) & 1)


def _status(pid: int, field: str) -> str:
    """The words of that field of /proc/PID/status; empty where the process is gone."""
    try:
        # A process's own name in this file is cut at 15 bytes, perhaps in the middle of a character.
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def set_command_line(argv: tuple[str, ...], comm: str) -> None:
    """Have `ps` show `argv` for this process, cut to the room that its own arguments took, and `comm` as its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, os.fsencode(comm)[:15] + b"\0")
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    text = b"\0".join(os.fsencode(arg) for arg in argv)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
