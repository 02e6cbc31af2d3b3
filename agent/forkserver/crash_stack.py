"""Has faulthandler write a crashing worker's Python stack into a file of its agent's, not to the program's stderr.

A fresh worker imports this before its program, so it imports as little as it can.
"""

from __future__ import annotations

import os
import sys

_module = None


def load() -> None:
    """Import in the fork server what `enable` needs, and leave nothing of it for a program to see."""
    global _module
    is_loaded = "faulthandler" in sys.modules
    import faulthandler

    _module = faulthandler
    if not is_loaded:
        # The program imports it itself, if it wants it.
        del sys.modules["faulthandler"]


def enable(fd: int) -> None:
    """Have the stack written to `fd` at SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT; the signal then has its effect.

    If the user has enabled faulthandler (PYTHONFAULTHANDLER, -X), it goes on writing to stderr. Nothing is done if `fd`
    is negative.
    """
    if fd < 0:
        return
    if _module is None:
        load()
    assert _module is not None
    os.set_inheritable(fd, False)
    if not _module.is_enabled():
        _module.enable(fd)
