"""Looks, before workers start, for what killed builders have left in torch's caches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elaunch.agent.at_once import at_once
from elaunch.agent.environment import extensions_root, inductor_root

if TYPE_CHECKING:
    from elaunch.agent.workers.cut_libraries import CutLibraries

# The loop waits no longer for a folder that is not the job's own: the lease has to be renewed.
DISK_S = 0.5
# A builder closes its lock just before it removes the file, and a linker may close its library for a moment.
_LOOK_AGAIN_S = 0.05
# How many folders deep a library lies. Extensions: kind of torch, extension. Inductor: one folder.
_EXTENSIONS_DEPTH, _INDUCTOR_DEPTH = 2, 1


class DeadBuilds:
    """The caches of torch that workers with these variables use. `warn` says what was removed, or is in the way."""

    def __init__(self, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self._warn = warn
        looks = {extensions_root(environ): _look_at_extensions, inductor_root(environ): _Inductor().look}
        self._looks = {root: look for root, look in looks.items() if root}

    def remove(self) -> None:
        """Before workers start: a rank that waits for a lock believes that the extension is built when it is gone.

        A folder that does not answer is not looked into any more.
        """
        if not self._looks:
            return
        roots = [*self._looks]
        # Threads, because the folders may be on a disk that hangs.
        works = [partial(self._looks[root], root, self._warn) for root in roots]
        done = at_once(works, DISK_S, "elaunch-builds", len(works))
        for place, root in enumerate(roots):
            if place not in done:
                del self._looks[root]
                self._warn(
                    f"{root} could not be looked through within {DISK_S:g} s: what killed builders leave there is not "
                    "looked for any more"
                )


def _look_at_extensions(root: str, say: Callable[[str], None]) -> None:
    if not os.path.isdir(root):  # noqa: PTH112
        return
    with suppress(OSError):
        # Imported here: most users build no extension.
        from elaunch.agent.workers.build_locks import free_locks
        from elaunch.agent.workers.cut_libraries import CutLibraries

        # An extension is built again into the library that is there, so no folder is left out.
        _remove(CutLibraries(root, _EXTENSIONS_DEPTH).find(), free_locks(root, say), say)


class _Inductor:
    """Inductor's cache. It has thousands of libraries, and each is made once: only the first look is at all of them."""

    def __init__(self) -> None:
        self._libraries: CutLibraries | None = None

    def look(self, root: str, say: Callable[[str], None]) -> None:
        if os.path.isdir(root):  # noqa: PTH112
            from elaunch.agent.workers.cut_libraries import CutLibraries

            self._libraries = self._libraries or CutLibraries(root, _INDUCTOR_DEPTH)
            _remove(self._libraries.find(), [], say)


def _remove(cut: list[Path], locks: list[Path], say: Callable[[str], None]) -> None:
    """Remove those that are still cut, or free, when the builders that live have gone on."""
    if not (cut or locks):
        return
    from elaunch.agent.workers.build_locks import remove_free
    from elaunch.agent.workers.cut_libraries import remove_cut

    time.sleep(_LOOK_AGAIN_S)
    # First the libraries: a rank that waits for a lock loads one as soon as that is gone.
    remove_cut(cut, say)
    remove_free(locks, say)
