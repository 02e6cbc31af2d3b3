"""Looks, before workers start, for what killed builders have left in torch's caches."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from elaunch.agent.at_once import at_once
from elaunch.agent.environment import extensions_root, inductor_root

# The loop waits no longer for a folder that is not the job's own: the lease has to be renewed.
DISK_S = 0.5
# How many folders deep a library lies. Extensions: kind of torch, extension. Inductor: one folder.
_EXTENSIONS_DEPTH, _INDUCTOR_DEPTH = 2, 1


class DeadBuilds:
    """The caches of torch that workers with these variables use. `warn` says what was removed, or is in the way."""

    def __init__(self, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self._warn = warn
        looks = {extensions_root(environ): _look_at_extensions, inductor_root(environ): _look_at_inductor}
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
        from elaunch.agent.workers.build_locks import remove_dead
        from elaunch.agent.workers.cut_libraries import remove_cut

        # First the libraries: a rank that waits for a lock loads one as soon as that is gone.
        remove_cut(root, _EXTENSIONS_DEPTH, say)
        remove_dead(root, say)


def _look_at_inductor(root: str, say: Callable[[str], None]) -> None:
    if os.path.isdir(root):  # noqa: PTH112
        from elaunch.agent.workers.cut_libraries import remove_cut

        remove_cut(root, _INDUCTOR_DEPTH, say)
