"""The environment that a fork server began with, in the memory that the kernel shows as /proc/PID/environ."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path

from elaunch.agent.linux import stat_fields


def at_start(variable: str) -> str | None:
    """The value of a variable when this process began; None without it."""
    first = f"{variable}=".encode()
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return next((os.fsdecode(entry[len(first) :]) for entry in entries if entry.startswith(first)), None)


def forget(variables: Collection[str]) -> None:
    """Remove these variables, also where the kernel shows them.

    Nothing may have kept a pointer to one of them (getenv).
    """
    for name in variables:
        os.environ.pop(name, None)
    start, end = (int(field) for field in stat_fields("self")[47:49])
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if os.fsdecode(entry.partition(b"=")[0]) in variables:
            ctypes.memset(at, 0, len(entry))
        at += len(entry) + 1
