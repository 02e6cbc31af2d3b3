"""A finder that leaves `sys.meta_path` while the program runs.

A fresh worker imports this before its program, so it imports as little as it can.
"""

from __future__ import annotations

import _frozen_importlib
import _imp
import sys
from _thread import get_ident

# `typing` itself is not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any


class ImportLock:
    """Python's own lock of imports: no thread begins to import a module meanwhile, or asks a finder, or forks."""

    def __enter__(self) -> None:
        _imp.acquire_lock()

    def __exit__(self, *_: object) -> None:
        _imp.release_lock()


class LeavingFinder:
    """Python goes through `sys.meta_path` by number. Whoever is in the middle must not miss the next finder."""

    _place = 0

    def _leave(self) -> bool:
        """Leave, unless another thread goes through the list. Returns whether this finder has left.

        The caller has Python's lock of imports, as in `find_spec`: no finder is asked meanwhile.
        """
        finders: list[Any] = sys.meta_path
        if self in finders and not _another_thread_asks():
            self._place = finders.index(self)
            del finders[self._place]
        return self not in finders

    def _find_behind(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        """The spec that the finders behind this one give. It has left, so its caller would skip the next one."""
        for finder in sys.meta_path[self._place :]:
            find_spec: Any = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec else None
            if spec is not None:
                return spec
        return None


def _another_thread_asks() -> bool:
    return any(_asks(frame) for ident, frame in sys._current_frames().items() if ident != get_ident())


def _asks(frame: Any) -> bool:
    system: Any = _frozen_importlib
    while frame is not None and frame.f_code is not system._find_spec.__code__:
        frame = frame.f_back
    return frame is not None
