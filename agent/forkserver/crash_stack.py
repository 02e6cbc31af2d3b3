"""Has faulthandler write a crashing worker's Python stack into a file of its agent's, not to the program's stderr.

A fresh worker imports this before its program, so it imports as little as it can.
"""

from __future__ import annotations

import os
import sys

# `typing` itself is not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What stands in that file before the byte that is the program's exit code.
EXIT_CODE = b"\nexit code: "
_imported: list[Any] = []


def faulthandler() -> Any:
    """The module, of which nothing is left for a program to see: the program imports it itself, if it wants it."""
    if not _imported:
        is_loaded = "faulthandler" in sys.modules
        import faulthandler as module

        _imported.append(module)
        if not is_loaded:
            del sys.modules["faulthandler"]
    return _imported[0]


def enable(fd: int) -> None:
    """Have the stack written to `fd` at SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT; the signal then has its effect.

    If the user has enabled faulthandler (PYTHONFAULTHANDLER, -X), it goes on writing to stderr. Nothing is done if `fd`
    is negative.
    """
    if fd < 0:
        return
    os.set_inheritable(fd, False)
    if not faulthandler().is_enabled():
        faulthandler().enable(fd)
