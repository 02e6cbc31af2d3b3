"""Plain values that a program changes on its modules during training: `dropout.p`, `bn.momentum`, a stage, a counter.

A value that has not changed since the first step is the program's, also when a later job sets another one. One that has
changed is state: it is restored like a buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.state.tree import State, is_numpy_scalar

_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class _Seen:
    """The values of a module when they were read last. `size` is the number of its attributes, plain or not."""

    path: str
    module: nn.Module
    names: list[str]
    values: list[Any]
    size: int

    def is_same(self) -> bool:
        """Whether they are still the same objects. A tensor in their place is not read."""
        its = vars(self.module)
        return len(its) == self.size and all(map(is_, map(its.get, self.names), self.values))

    def by_path(self) -> Iterator[tuple[str, str, Any]]:
        for name, value in zip(self.names, self.values, strict=True):
            yield _joined(self.path, name), name, value


class ModuleValues:
    """The values of the modules that `follow` gets. They are named by path: `blocks.0.drop.p`."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, nn.Module, bool]] = []
        # Those that have changed, by path, read each time. `find_changes` reads the others from the first step on.
        self._changed: dict[str, tuple[nn.Module, str]] = {}
        self._seen: list[_Seen] | None = None

    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Set the modules. The initial values of a new one are not changes."""
        own: dict[type, bool] = {}
        self._modules = [(name, one, own.setdefault(type(one), _is_programs(type(one)))) for name, one in modules]
        if self._seen is not None:
            self._seen = self._read()

    def begin(self) -> None:
        """Begin the first step: what changes from now on is state."""
        if self._seen is None:
            self._seen = self._read()

    def _read(self) -> list[_Seen]:
        found = []
        for path, module, is_own in self._modules:
            its = vars(module)
            names = [name for name, value in [*its.items()] if _counts(name, value, is_own=is_own)]
            if type(module) is DistributedDataParallel:
                # `no_sync` changes its flags.
                names = [name for name in names if type(its[name]) is not bool]
            names = [name for name in names if _joined(path, name) not in self._changed]
            found.append(_Seen(path, module, names, [its[name] for name in names], len(its)))
        return found

    def find_changes(self) -> dict[str, tuple[Any, Any]]:
        """Find values that have changed for the first time: the old and the new one by path."""
        if self._seen is None or all(one.is_same() for one in self._seen):
            return {}
        before = {path: value for one in self._seen for path, _, value in one.by_path()}
        found = {}
        for one in self._read():
            for path, name, value in one.by_path():
                if before.get(path) != value:
                    found[path] = before.get(path), value
                    self._changed[path] = one.module, name
        self._seen = self._read()
        return found

    def now(self) -> State:
        """The current values of those that have changed, by path."""
        if not self._changed:
            return {}
        values = [(path, vars(module).get(name)) for path, (module, name) in [*self._changed.items()]]
        return {path: value for path, value in values if _is_plain(value)}

    def load(self, values: State) -> list[str]:
        """Set these values. Returns the paths of those that differed."""
        places = {place: module for place, module, _ in self._modules}
        others = []
        for path, value in values.items():
            place, _, name = path.rpartition(".")
            if (module := places.get(place)) is not None:
                self._changed[path] = module, name
                if (old := vars(module).get(name)) != value or type(old) is not type(value):
                    others.append(path)
                    setattr(module, name, value)
        return others


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _counts(name: str, value: object, *, is_own: bool) -> bool:
    """Whether it is a value that a program sets. Private ones of libraries do not count."""
    if name in _OF_MODULES or not _is_plain(value):
        return False
    return name[:1] != "_" or (is_own and type(value) in (int, float))


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or is_numpy_scalar(value)


def _is_programs(kind: type) -> bool:
    """Whether a class is the program's, without a base class from a library other than torch."""
    modules = [one.__module__ for one in kind.__mro__ if one.__module__.partition(".")[0] != "torch"]
    files = [getattr(sys.modules.get(name), "__file__", None) or "" for name in modules]
    return kind.__module__ in modules and not any("site-packages" in file for file in files)
