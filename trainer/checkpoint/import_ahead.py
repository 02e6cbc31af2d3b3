"""Imports what writes a checkpoint while training goes on: torch.distributed.checkpoint takes a while to import."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# An import that adds no module for so long waits for something itself, perhaps for the thread that forks.
_FORK_WAIT_S = 30.0


def import_ahead() -> None:
    """Begin in a thread. To be called once, when the first step is done.

    By then the program has imported what it needs to train, and a restart has its first step behind it. Whoever needs
    the modules meanwhile waits for the end of the import, as everywhere in Python.
    """
    # No daemon: if an interpreter ends while a thread runs Python code for C++, the process may abort.
    thread = threading.Thread(target=_import, name="imports")

    def wait() -> None:
        if threading.current_thread() is not thread:
            wait_while_it_goes_on(thread)

    # A forked child has no such thread: an import that it had begun would never end there, and the child would wait for
    # it for ever.
    os.register_at_fork(before=wait)
    thread.start()


def wait_while_it_goes_on(thread: threading.Thread) -> None:
    """Wait for the end of an import in `thread`, on a busy machine for minutes; not for one that stands still."""
    before = -1
    while thread.is_alive() and before != (modules := len(sys.modules)):
        before = modules
        thread.join(_FORK_WAIT_S)


def _import() -> None:
    # If it fails, the first checkpoint imports it again, and reports what is wrong.
    with contextlib.suppress(Exception):
        from elaunch.trainer.checkpoint import writing  # noqa: F401
