"""Imports what writes a checkpoint while training goes on: torch.distributed.checkpoint takes a while to import."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from types import ModuleType
from typing import Any

# An import that adds no module for so long waits for something itself, perhaps for the thread that forks.
_FORK_WAIT_S = 30.0


def import_ahead() -> None:
    """Begin in a thread. To be called once, when the first step is done.

    By then the program has imported what it needs to train, and a restart has its first step behind it. Whoever needs
    the modules meanwhile waits for the end of the import, as everywhere in Python.
    """
    # No daemon: if an interpreter ends while a thread runs Python code for C++, the process may abort.
    thread = threading.Thread(target=_import, name="imports")
    standing: list[int] = []

    def wait() -> None:
        standing.clear()
        if threading.current_thread() is thread:
            return
        wait_while_it_goes_on(thread)
        if thread.is_alive() and thread.ident:
            standing.append(thread.ident)

    def break_off() -> None:
        for ident in standing:
            break_off_imports(ident)

    # A module is best imported once: a library may not bear a second half of an import.
    os.register_at_fork(before=wait, after_in_child=break_off)
    thread.start()


def wait_while_it_goes_on(thread: threading.Thread) -> None:
    """Wait for the end of an import in `thread`, on a busy machine for minutes; not for one that stands still."""
    before = -1
    while thread.is_alive() and before != (modules := len(sys.modules)):
        before = modules
        thread.join(_FORK_WAIT_S)


def break_off_imports(thread: int) -> None:
    """In a forked child: let it import anew what the thread with that number imports, which is not in the child.

    A module's lock would be that thread's for ever, and the child would wait for it for ever. What is half imported is
    removed, as Python removes a module whose import fails.
    """
    system: Any = importlib._bootstrap
    locks = getattr(system, "_module_locks", {})
    for name, reference in [*locks.items()]:
        lock = reference()
        if lock is None or lock.owner != thread:
            continue
        del locks[name]
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and getattr(vars(module).get("__spec__"), "_initializing", False):
            del sys.modules[name]


def _import() -> None:
    # If it fails, the first checkpoint imports it again, and reports what is wrong.
    with contextlib.suppress(Exception):
        from elaunch.trainer.checkpoint import writing  # noqa: F401
