"""Linux calls that Python's standard library has no name for."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import SO_PEERCRED, SOL_SOCKET, socket
from typing import Any, TypeVar

Key = TypeVar("Key")
Found = TypeVar("Found")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61
_LINE_BYTES_MAX = 512


def _libc() -> Any:
    # Imported here: the agent has no use for it, and a job's first worker would wait for the import.
    from ctypes import CDLL

    return CDLL(None, use_errno=True)


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send `signum` to this process when `parent` exits; exit at once if it already has.

    Fork clears the setting, exec keeps it. To the kernel the parent is the thread that forked.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _libc().prctl(_PR_SET_PDEATHSIG, 0)


def allow_tracer(pid: int) -> None:
    """Let that process and its children trace this one, where the kernel allows only ancestors (Yama).

    The setting survives exec, but children do not inherit it. Without Yama it has no effect.
    """
    _libc().prctl(_PR_SET_PTRACER, pid)


def credentials(connection: socket) -> tuple[int, int]:
    """The pid and user id of a Unix socket's peer, from the kernel."""
    form = struct.Struct("3i")
    pid, uid, _ = form.unpack(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, form.size))
    return pid, uid


def catches(pid: int, signum: int) -> bool:
    """Whether that process has a handler for the signal; False if it has exited."""
    return bool(int(status(pid, "SigCgt") or "0", 16) >> (signum - 1) & 1)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Run `work` in a daemon thread. None at the thread limit (`pids.max`, `ulimit -u`)."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def in_threads(works: Mapping[Key, Callable[[], Found]], within_s: float, name: str) -> dict[Key, Found]:
    """Run each work in a daemon thread; return the results that come within `within_s`. A work must not raise.

    The threads of `concurrent.futures` are joined when the process exits. One of them that waits for a process in an
    uninterruptible sleep would hold that exit up.
    """
    found: dict[Key, Found] = {}
    end_s = time.monotonic() + within_s

    def run(key: Key, work: Callable[[], Found]) -> None:
        found[key] = work()

    for thread in [start_thread(partial(run, key, work), name) for key, work in works.items()]:
        if thread:
            thread.join(max(0.0, end_s - time.monotonic()))
    return dict(found)


def is_in_foreground(fd: int) -> bool:
    """Whether `fd` is this process's terminal, and the shell lets it read there."""
    with suppress(OSError):
        return os.tcgetpgrp(fd) == os.getpgrp()
    return False


def signal_fd(signums: Iterable[int]) -> int:
    """A signalfd that is readable while one of these signals, which the caller blocks, is pending. Raises OSError."""
    from ctypes import c_ulong, get_errno

    # A sigset_t has 128 bytes.
    mask = (c_ulong * 16)(sum(1 << (signum - 1) for signum in signums))
    fd: int = _libc().signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        raise OSError(get_errno(), os.strerror(get_errno()))
    return fd


# Calls in which a thread sleeps, by their numbers (linux/arch/*/entry/syscalls).
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 23: "select",
        35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
        61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 63: "read", 64: "write", 65: "readv", 66: "writev",
        67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 95: "waitid",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}.get(os.uname().machine, {})  # fmt: skip


def thread_call(pid: int, tid: int) -> tuple[str, str]:
    """The name of the system call in which a thread sleeps, and its arguments, stack pointer and PC in hex.

    Both are empty where the thread runs, has exited, or may not be traced. The name alone is empty for a call in
    which threads seldom sleep.
    """
    try:
        # Without pathlib, which takes ten times as long: a process may have a hundred threads.
        with open(f"/proc/{pid}/task/{tid}/syscall", "rb", 0) as file:  # noqa: PTH123
            number, _, rest = file.read(_LINE_BYTES_MAX).decode().strip().partition(" ")
    except OSError:
        return "", ""
    # If the thread runs, the file has only "running".
    return (_CALLS.get(int(number), ""), rest) if rest else ("", "")


def text_of(path: str | Path) -> str:
    """The stripped text of the file; empty if it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text(errors="surrogateescape").strip()
    return ""


def memory_file(name: str, text: str, *, outlives_exec: bool = False) -> int:
    """A new memfd that holds `text`, positioned at its start."""
    fd = os.memfd_create(name, 0 if outlives_exec else os.MFD_CLOEXEC)
    with open(fd, "w", closefd=False) as file:
        file.write(text)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def state(pid: int) -> str:
    """The letter of that process's state in /proc: R, S, D, T, t, Z; empty if the process has exited."""
    return status(pid, "State")[:1]


def parent(pid: int) -> int:
    """The pid of that process's parent; 0 if it has exited."""
    return int(status(pid, "PPid") or "0")


def children(pid: int) -> list[int]:
    """The pids of this process's children, of all its threads; none if it has exited."""
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


def status(pid: int, field: str) -> str:
    """The value of that field of /proc/PID/status; empty if the process has exited.

    `Name` is that of the main thread, of 15 bytes at most.
    """
    try:
        # Without pathlib, which takes longer than the kernel: a restart reads this of each worker.
        with open(f"/proc/{pid}/status", "rb", 0) as file:  # noqa: PTH123
            # A process's own name in this file is cut at 15 bytes, perhaps in the middle of a character.
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def normal_path(path: str) -> str:
    """The path without `.` and `..`, if that names the same file: its folder may be a link, or another host's."""
    normal = os.path.normpath(path)
    with suppress(OSError, ValueError):
        return normal if Path(path).samefile(normal) else path
    return path


def stat_fields(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on. Raises OSError if that process has exited."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def set_command_line(argv: tuple[str, ...], comm: str) -> None:
    """Have `ps` show `argv` for this process, cut to the size of its own arguments, and `comm` as its name."""
    from ctypes import memmove

    _libc().prctl(_PR_SET_NAME, os.fsencode(comm)[:15] + b"\0")
    start, end = (int(field) for field in stat_fields("self")[45:47])
    text = b"\0".join(os.fsencode(arg) for arg in argv)[: end - start - 1]
    memmove(start, text.ljust(end - start, b"\0"), end - start)
