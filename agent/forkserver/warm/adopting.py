"""Makes a fork of a warm fork server the fork server of a job: it takes over what a child of that agent would have."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elaunch.agent.forkserver.preload import restore_environment
from elaunch.agent.forkserver.warm.handover import Handover
from elaunch.agent.guardian.guardian import VARIABLE
from elaunch.agent.linux import set_command_line, stat_fields

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# struct prctl_mm_map of linux/prctl.h: eleven addresses, the auxiliary vector (not set), the executable (not set).
_MAP = struct.Struct("=11QQIi")


def adopt(handover: Handover, folder_fd: int, customised: Mapping[str, str | None]) -> None:
    """Take over the session, folder, umask, signals and environment of the job. Raises OSError.

    `customised` are the variables that the user's sitecustomize sets or removes in each interpreter.
    """
    os.setsid()
    os.fchdir(folder_fd)
    os.umask(handover.umask)
    _signals(handover)
    Path("/proc/self/oom_score_adj").write_text(handover.oom_score)
    os.environ.clear()
    os.environ.update(handover.variables)
    _show(handover.boot.program.argv, handover.variables)
    set_command_line(("elaunch: fork server",), "elaunch-fork")
    restore_environment(customised)
    process: Any = sys.modules.get("multiprocessing.process")
    if process:
        # Processes that the program starts later look there for its modules.
        process.ORIGINAL_DIR = os.getcwd()  # noqa: PTH109


def _signals(handover: Handover) -> None:
    ignored = {*handover.ignored, *handover.boot.ignored}
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signum in ignored:
            signal.signal(signum, signal.SIG_IGN)
        elif signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def _show(argv: tuple[str, ...], variables: Mapping[str, str]) -> None:
    """Have the kernel show this command line and environment, to `ps` and to the job's guardian.

    If the kernel cannot move them (it was built without CONFIG_CHECKPOINT_RESTORE), the command line has the room of
    the earlier one, and only the marker is replaced in the earlier environment. Raises OSError where it has no room.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    entries = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    if not _move(words, entries):
        set_command_line(argv, "")
        _mark(variables.get(VARIABLE, ""))


def _move(words: bytes, entries: bytes) -> bool:
    """Put both into memory of their own, and tell the kernel. Returns whether it agrees."""
    size = len(words) + len(entries)
    # The kernel shows only private memory. It is never freed.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:size] = words + entries
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _kept.append(memory)
    fields = [int(field) if field.isdigit() else 0 for field in stat_fields("self")]
    start_code, end_code, start_stack = fields[23:26]
    start_data, end_data, start_brk = fields[42:45]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    places = (start, start + len(words), start + len(words), start + size)
    program = (start_code, end_code, start_data, end_data, start_brk, libc.sbrk(0), start_stack)
    order = ctypes.create_string_buffer(_MAP.pack(*program, *places, 0, 0, -1))
    address = ctypes.c_ulong(ctypes.addressof(order))
    return bool(libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, address, ctypes.c_ulong(_MAP.size), 0) == 0)


_kept: list[mmap.mmap] = []


def _mark(marker: str) -> None:
    """Write the marker over the one in the environment that the process began with."""
    text = os.fsencode(f"{VARIABLE}={marker}")
    start, end = (int(field) for field in stat_fields("self")[47:49])
    environment = ctypes.string_at(start, end - start)
    at = environment.find(f"{VARIABLE}=".encode())
    room = environment.find(b"\0", at) - at
    if at < 0 or len(text) > room:
        raise OSError("there is no room for the job's marker")
    ctypes.memmove(start + at, text.ljust(room, b"\0"), room)


def yield_to_others() -> None:
    """Have the kernel end this process first, if memory is short. A fork of it takes its job's value (`adopt`)."""
    with suppress(OSError, ValueError):
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(min(1000, int(path.read_text()) + 500)))
