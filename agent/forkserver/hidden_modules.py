"""Hides preloaded modules until the program imports them, and then applies the variables that the program has set.

Many variables are read when torch is imported. In a forked worker, torch is imported before the script sets them. So
at the script's own `import torch`, the modules that can read their variables again do so. The log names the variables
that come too late.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from elaunch.agent.forkserver import after_fork, exit_report, fixups
from elaunch.agent.forkserver.finders import ImportLock, LeavingFinder
from elaunch.agent.forkserver.preload import Brought, hidden_packages, restore_environment
from elaunch.agent.forkserver.replay_environment import replay

# What a module may have imported that has imported torch.
_OF_TORCH = ("torch", "torch.distributed")


class Gate(LeavingFinder):
    """Hides torch, numpy and the packages that were preloaded by name, and puts each back when it is imported.

    The modules that came with a package come back with it, and so do those that it has imported. Another package, such
    as numpy, also comes back alone. The gate is made once, before any fork. Its base class is ours: importlib.abc would
    bring thirty modules.
    """

    def __init__(self, brought: Sequence[Brought]) -> None:
        packages = hidden_packages([each.name for each in brought])
        where = {n: each for each in brought for n in each.modules if n.partition(".")[0] in packages}
        self._hidden = [_Hidden(b, {n: b.modules[n] for n, each in where.items() if each is b}) for b in brought]
        # What other threads were importing when its package came back: they will put it back.
        self._awaited: dict[str, ModuleType] = {}
        # When the program imports one of these packages, all modules that came with its preload come back too.
        self._named = {each.name.partition(".")[0] for each in brought} | {"torch"}
        # In the order of their imports: what one of them has imported comes before it.
        self._packages = [each for each in self._hidden if each.brought.is_package]
        self._environment = dict(os.environ)
        self._link = 0
        self._told: set[str] = set()
        if not where:
            return
        fixups.forget({name: each.modules[name] for name, each in where.items()})
        for name, each in where.items():
            _unbind(name, each.modules[name])
        for name in where:
            del sys.modules[name]
        added = [f for each in brought for f in each.filters]
        _set_filters([f for f in warnings.filters if f not in added])
        sys.meta_path.insert(0, self)

    def stand(self, link: int) -> None:
        """Begin in a worker that has this link. Only later changes of its environment are applied again."""
        self._environment = dict(os.environ)
        self._link = link

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        hidden = self._where(name)
        module = hidden.modules.get(name) if hidden else self._awaited.get(name)
        if module is None or module.__spec__ is None:
            return self._find_behind(name, path, target) if self._is_empty and self._leave() else None
        known = module.__spec__
        loader: Any = _Handover(self, module)
        spec = ModuleSpec(name, loader, origin=known.origin)
        spec.submodule_search_locations = known.submodule_search_locations
        spec.has_location = known.has_location
        return spec

    def open(self, name: str) -> None:
        """Put the module back, with all that came when its package was imported, and what they have imported."""
        with ImportLock():
            hidden = self._where(name)
            if hidden is None:
                # Its package came back while this thread was importing the module.
                self._awaited.pop(name, None)
                self._leave_if_empty()
                return
            opened = [(each.brought, self._put_back(name, each)) for each in self._taken(hidden)]
            self._leave_if_empty()
        changed = {n for n in {*self._environment, *os.environ} if self._environment.get(n) != os.environ.get(n)}
        for each, back in opened:
            if self._comes_whole(name, each):
                _register(each)
            self._set_own(each, changed)
            fixups.find_out_again(back)
        modules = opened[0][1] if len(opened) == 1 else {n: module for _, back in opened for n, module in back.items()}
        after_fork.set_threads(changed, modules)
        for each, back in opened:
            whose = name if each is hidden.brought else each.name
            self._tell(whose, replay(changed, each.readers, back))
        if hidden.brought.is_package and any(map(_has_torch, modules.values())):
            # The program may never import it by itself.
            for of_torch in _OF_TORCH:
                self.open(of_torch)

    def _where(self, name: str) -> _Hidden | None:
        return next((each for each in self._hidden if name in each.modules), None)

    def _taken(self, hidden: _Hidden) -> list[_Hidden]:
        """What comes back with it, which is itself the last one. Of packages each comes back once, and whole."""
        if not hidden.brought.is_package:
            return [hidden]
        count = next(number for number, each in enumerate(self._packages, 1) if each is hidden)
        taken, self._packages = self._packages[:count], self._packages[count:]
        return taken

    def _set_own(self, brought: Brought, changed: Collection[str]) -> None:
        """Set the variables that the import sets in a fresh interpreter too."""
        own = {n: value for n, value in brought.sets.items() if n not in changed}
        restore_environment(own)
        self._environment |= {n: value for n, value in own.items() if value is not None}

    def _comes_whole(self, name: str, brought: Brought) -> bool:
        return brought.is_package or name.partition(".")[0] in self._named

    def _put_back(self, name: str, hidden: _Hidden) -> dict[str, ModuleType]:
        if self._comes_whole(name, hidden.brought):
            # All workers of a restart do this at the same time, so there is no loop over a thousand modules.
            back, hidden.modules = hidden.modules, {}
        else:
            package = name.partition(".")[0]
            back = {n: module for n, module in hidden.modules.items() if n.partition(".")[0] == package}
            for known in back:
                del hidden.modules[known]
        # A thread that has not found a module in sys.modules would load it from its file if the module were there by
        # the time that the thread asks the finders.
        awaited = _imported_by_other_threads() & back.keys()
        self._awaited |= {n: back[n] for n in awaited}
        # An entry that the program has made itself stays: a stand-in, or None, which forbids the import.
        if left := awaited | (back.keys() & sys.modules.keys()):
            sys.modules.update({n: module for n, module in back.items() if n not in left})
        else:
            sys.modules.update(back)
        return back

    @property
    def _is_empty(self) -> bool:
        return not self._awaited and not any(each.modules for each in self._hidden)

    def _leave_if_empty(self) -> None:
        if self._is_empty:
            self._leave()

    def _tell(self, name: str, late: set[str]) -> None:
        if new := late - self._told:
            self._told |= new
            which = " and ".join(sorted(new))
            text = f"{which}: set by the program when {name} had been imported already, without effect there"
            exit_report.tell(self._link, {"event": "note", "text": f"{text}; set it in the shell, or use --no-preload"})


@dataclass
class _Hidden:
    """What an import has brought, and those of its modules that are still hidden, by name."""

    brought: Brought
    modules: dict[str, ModuleType]


class _Handover:
    """Loads a module by returning the one that was preloaded."""

    def __init__(self, gate: Gate, module: ModuleType) -> None:
        self._gate = gate
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._gate.open(module.__name__)
        finally:
            # Not before: as long as the module has the import's own spec, other threads wait for the end of the import.
            module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader if self._spec else None, name)


def _imported_by_other_threads() -> set[str]:
    """The modules that other threads are importing: these have the modules' locks, or wait for them."""
    system: Any = importlib._bootstrap
    mine = threading.get_ident()
    locks = [(name, lock()) for name, lock in [*system._module_locks.items()]]
    return {name for name, lock in locks if lock is not None and lock.owner != mine}


def _register(brought: Brought) -> None:
    """Make the warning filters and exit functions of an import this process's own."""
    if brought.filters:
        _set_filters([*brought.filters, *(f for f in warnings.filters if f not in brought.filters)])
    for call, args, kwargs in brought.at_exit:
        atexit.register(call, *args, **kwargs)


def _has_torch(module: ModuleType) -> bool:
    return isinstance(vars(module).get("torch"), ModuleType)


def _unbind(name: str, module: ModuleType) -> None:
    """Also delete a module's attribute in its package, if the package imports the module lazily."""
    package, _, child = name.rpartition(".")
    parent = sys.modules.get(package)
    if _imports_lazily(parent, child) and vars(parent).get(child) is module:
        delattr(parent, child)


def _imports_lazily(package: object, child: str) -> bool:
    """Whether a package has the module on its list of lazy ones, as torch has."""
    # A package's own __getattr__ may answer anything, or import something.
    names = vars(package).get("_lazy_modules") if isinstance(package, ModuleType) else None
    return isinstance(names, Collection) and child in names


def _set_filters(filters: list[Any]) -> None:
    # After resetwarnings(), modules that have warned before check the filters again.
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]
