"""What was preloaded stays out of sight until the program imports it, and then hears what the program has set.

Many variables are read when torch is imported. A script that sets one before its own `import torch` comes too late in
a forked worker; so at that import the readers that can be asked to read again are asked, and the rest is said.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from elaunch.agent import fresh, lastwords
from elaunch.agent.preload import Brought
from elaunch.agent.replay import replay


def close(brought: Sequence[Brought]) -> None:
    """Hide torch, numpy and the packages that were asked for by name until they are imported.

    What came with a name comes back with it; numpy, which comes with torch, also alone.
    """
    named = {each.name.partition(".")[0] for each in brought} | {"torch"}
    hidden = [
        replace(each, modules={n: m for n, m in each.modules.items() if n.partition(".")[0] in {*named, "numpy"}})
        for each in brought
    ]
    for name, module in [item for each in hidden for item in each.modules.items()]:
        _unbind(name, module)
    for name in [name for each in hidden for name in each.modules]:
        del sys.modules[name]
    if any(each.modules for each in hidden):
        added = [f for each in hidden for f in each.filters]
        _set_filters([f for f in warnings.filters if f not in added])
        sys.meta_path.insert(0, _Gate(hidden, named))


class _Gate(MetaPathFinder):
    """Finds what is hidden, and lets it in when it is loaded."""

    def __init__(self, hidden: list[Brought], named: set[str]) -> None:
        self._hidden = hidden
        self._named = named
        self._environment = dict(os.environ)
        self._link = os.fstat(lastwords.LINK_FD).st_ino
        self._told: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = next((each.modules[name] for each in self._hidden if name in each.modules), None)
        if module is None or module.__spec__ is None:
            return None
        known = module.__spec__
        spec = ModuleSpec(name, _Handover(self, module), origin=known.origin)
        spec.submodule_search_locations = known.submodule_search_locations
        spec.has_location = known.has_location
        return spec

    def open(self, name: str) -> None:
        """Let the module in, with all that came when its package was imported."""
        top = name.partition(".")[0]
        group = next(each for each in self._hidden if name in each.modules)
        is_named = top in self._named
        back = {n: m for n, m in group.modules.items() if is_named or n.partition(".")[0] == top}
        for known in back:
            del group.modules[known]
        sys.modules.update(back)
        if is_named:
            self._hidden.remove(group)
            _set_filters([*group.filters, *(f for f in warnings.filters if f not in group.filters)])
        if not any(each.modules for each in self._hidden):
            sys.meta_path.remove(self)
        changed = {n for n in {*self._environment, *os.environ} if self._environment.get(n) != os.environ.get(n)}
        fresh.set_threads(changed, back)
        self._tell(name, replay(changed, group.readers, back))

    def _tell(self, name: str, late: set[str]) -> None:
        if new := late - self._told:
            self._told |= new
            text = f"{' and '.join(sorted(new))} came too late: {name} had been imported before the program set it"
            lastwords.tell(self._link, {"event": "note", "text": f"{text}; set it in the shell, or use --no-preload"})


def _unbind(name: str, module: ModuleType) -> None:
    """Take a module out of its package too, where the package imports it when it is first asked for."""
    package, _, child = name.rpartition(".")
    parent = sys.modules.get(package)
    if child in getattr(parent, "_lazy_modules", ()) and vars(parent).get(child) is module:
        delattr(parent, child)


def _set_filters(filters: list[Any]) -> None:
    # So that the modules that have warned before look at the filters again.
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


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
