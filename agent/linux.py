"""Linux calls that Python's standard library has no name for."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when `parent` ends; exits at once if it already has.

    Must be called by the main thread's process right after fork: the kernel forgets the wish at fork, not at exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def allow_tracer(pid: int) -> None:
    """Let that process and its children look into this one, where the kernel lets only ancestors (Yama).

    A program that this process begins with exec keeps it, its children do not. Without Yama nothing happens.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, pid)


def ptrace_scope() -> int | None:
    """The kernel's setting of who may look into which process (Yama). None without it."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return None


def catches(pid: int, signum: int) -> bool:
    """Whether that process has a handler for the signal; not, where it is gone."""
    return _is_in(pid, "SigCgt", signum)


def is_pending(pid: int, signum: int) -> bool:
    """Whether that process was sent the signal and blocks it."""
    return _is_in(pid, "ShdPnd", signum)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Run `work` in a daemon thread. None if the system gives no other thread (`pids.max`, `ulimit -u`)."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def is_stopped(pid: int) -> bool:
    """Whether a SIGSTOP or a debugger holds that process; not, where it is gone."""
    return _status(pid, "State")[:1] in ("T", "t")


# The numbers of read, and of the select by which readline waits (linux/arch/*/entry/syscalls).
_READ_CALLS, _SELECT_CALLS = {"x86_64": (0, (23, 270)), "aarch64": (63, (72,))}.get(os.uname().machine, (-1, ()))


def waits_for_terminal(pid: int) -> bool:
    """Whether that process's main thread waits for keys on its stdin, which is a terminal; not, where it is gone."""
    try:
        number, first, *_ = Path(f"/proc/{pid}/syscall").read_text().split()
        terminal = os.readlink(f"/proc/{pid}/fd/0")  # noqa: PTH115
    except (OSError, ValueError):
        # It runs ("running"), is gone, or may not be looked into.
        return False
    if not terminal.startswith(("/dev/pts/", "/dev/tty")):
        return False
    return (int(number) == _READ_CALLS and int(first, 16) == 0) or (
        int(number) in _SELECT_CALLS and int(first, 16) == 1
    )


def state(pid: int) -> str:
    """The letter of that process's state in /proc: R, S, D, T, t, Z; empty where the process is gone."""
    return _status(pid, "State")[:1]


def parent(pid: int) -> int:
    """The pid of that process's parent; 0 where it is gone."""
    return int(_status(pid, "PPid") or "0")


def children(pid: int) -> list[int]:
    """The processes that this process's threads have begun and that still run; none where it is gone."""
    found: list[int] = []
    # Without pathlib, which takes ten times as long: a process may have a hundred threads.
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return sorted(found)


def descendants(pid: int, most: int = 64) -> list[int]:
    """The children of this process, theirs, and so on, until `most` are found: data loaders, compilers."""
    found: list[int] = []
    waiting = [pid]
    while waiting and len(found) < most:
        begun = children(waiting.pop())
        found += begun
        waiting += begun
    return found


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


def stat_fields(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on. Raises OSError if that process is gone."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def set_command_line(argv: tuple[str, ...], comm: str) -> None:
    """Have `ps` show `argv` for this process, cut to the room that its own arguments took, and `comm` as its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, os.fsencode(comm)[:15] + b"\0")
    fields = stat_fields("self")
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    text = b"\0".join(os.fsencode(arg) for arg in argv)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
