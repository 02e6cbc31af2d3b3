"""What was preloaded stays out of sight until the program imports it, and then hears what the program has set.

Many variables are read when torch is imported. A script that sets one before its own `import torch` comes too late in
a forked worker; so at that import the readers that can be asked to read again are asked, and the rest is said.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from elaunch.agent import fresh, lastwords
from elaunch.agent.preload import Preloaded
from elaunch.agent.replay import replay


def close(preloaded: Preloaded, names: Collection[str]) -> None:
    """Take the packages of `names`, torch and numpy out of `sys.modules` until they are imported."""
    whole = {name.partition(".")[0] for name in names} | {"torch"}
    tops = whole | {"numpy"}
    hidden = {name: module for name, module in preloaded.modules.items() if name.partition(".")[0] in tops}
    for name in hidden:
        del sys.modules[name]
    if hidden:
        sys.meta_path.insert(0, _Gate(hidden, whole, preloaded.readers))


class _Gate(MetaPathFinder):
    """Finds what is hidden. A package that was preloaded brings everything back, another only itself."""

    def __init__(self, hidden: dict[str, ModuleType], whole: Collection[str], readers: dict[str, set[str]]) -> None:
        self._hidden = hidden
        self._whole = whole
        self._readers = readers
        self._environment = dict(os.environ)
        self._link = os.fstat(lastwords.LINK_FD).st_ino

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._hidden.get(name)
        if module is None or module.__spec__ is None:
            return None
        known = module.__spec__
        spec = ModuleSpec(name, _Handover(self, module), origin=known.origin)
        spec.submodule_search_locations = known.submodule_search_locations
        spec.has_location = known.has_location
        return spec

    def open(self, name: str) -> None:
        """Let the package `name` in."""
        everything = name in self._whole
        back = {n: m for n, m in self._hidden.items() if everything or n.partition(".")[0] == name}
        for known in back:
            del self._hidden[known]
        sys.modules.update(back)
        if not self._hidden:
            sys.meta_path.remove(self)
        changed = {n for n in {*self._environment, *os.environ} if self._environment.get(n) != os.environ.get(n)}
        fresh.set_threads(changed)
        late = replay(changed, self._readers)
        if late:
            which = " and ".join(sorted(late))
            text = (
                f"{which}: set by the program after {name} had been imported for it; to have an effect, set it in the"
            )
            lastwords.tell(self._link, {"event": "note", "text": f"{text} shell or use --no-preload"})


class _Handover(Loader):
    """Loads a module by handing over the one that there is."""

    def __init__(self, gate: _Gate, module: ModuleType) -> None:
        self._gate = gate
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        self._gate.open(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader if self._spec else None, name)
