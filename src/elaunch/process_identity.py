"""A process's identity on its host, by which a successor can check whether it is dead."""

from __future__ import annotations

import os
import re
from pathlib import Path

_START_TIME_FIELD = 22
_PID = re.compile("[0-9]{1,10}")


def this_process() -> str:
    """This process's identity: boot, pid namespace, pid and start time; no other process ever has the same."""
    return f"{_place()}:{os.getpid()}:{_started(os.getpid())}"


def is_here(process: str) -> bool:
    """Whether `process` (from `this_process`) was started on this boot of this host, in this pid namespace."""
    return process.rsplit(":", 2)[0] == _place()


def is_dead_here(process: str) -> bool:
    """Whether `process` `is_here`, and has exited. False for a process elsewhere: this host cannot check it."""
    _, pid, started = [*["", ""], *process.rsplit(":", 2)][-3:]
    return is_here(process) and bool(_PID.fullmatch(pid)) and _started(int(pid)) != started


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name
    except OSError:
        return "unknown"
    return f"{boot}:{namespace}"


def _started(pid: int) -> str:
    """Clock ticks from boot to the process's start; empty if the pid does not exist, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # The command name, in parentheses, may contain any character.
    fields = text[text.rindex(")") + 2 :].split()
    return "" if fields[0] in ("Z", "X") else fields[_START_TIME_FIELD - 3]
