"""Plain values that a program changes on its modules in mid-training: `dropout.p`, `bn.momentum`, a stage, a counter.

A value that stays as the program has made it is the program's, also when a later job makes it otherwise. One that has
changed since the first step is state: it is restored like a buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.state.tree import State, is_numpy_scalar

_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
# What programs change of torch's modules: the rate of Dropout, the momentum of BatchNorm.
_OFTEN = ("p", "momentum")


@dataclass
class _Values:
    """The values of some modules when they were read last: where they are, their paths, and what they were."""

    places: list[tuple[itemgetter[Any], dict[str, Any]]] = field(default_factory=list)
    paths: list[tuple[str, nn.Module, str]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def are_same(self) -> bool:
        """Whether they are the same objects still. Nothing of a tensor in such a place is asked for."""
        try:
            return all(map(is_, chain.from_iterable([read(its) for read, its in self.places]), self.seen))
        except KeyError:
            # One was deleted.
            return False


class ModuleValues:
    """The values of modules, which `follow` names. All names of values are paths: `blocks.0.drop.p`.

    Those of modules that are not torch's, and those that programs change of torch's, are looked at in each step.
    """

    def __init__(self) -> None:
        self._modules: list[tuple[str, nn.Module, bool]] = []
        # Those that have changed, by path, and whether they are looked at often. They are read each time.
        self._changed: dict[str, tuple[nn.Module, str, bool]] = {}
        self._has_begun = False
        self._often, self._seldom = _Values(), _Values()
        self._sizes: list[int] = []

    def follow(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """These are the modules. A value that a new one comes with has not changed."""
        own: dict[type, bool] = {}
        self._modules = [(name, one, own.setdefault(type(one), _is_programs(type(one)))) for name, one in modules]
        if self._has_begun:
            self._note()

    def begin(self) -> None:
        """The first step begins: what is changed from now on is state."""
        if not self._has_begun:
            self._has_begun = True
            self._note()

    def _note(self) -> None:
        self._often, self._seldom = _Values(), _Values()
        for place, module, is_own in self._modules:
            its = vars(module)
            names = [name for name, value in [*its.items()] if _counts(name, value, is_own=is_own)]
            if type(module) is DistributedDataParallel:
                # `no_sync` changes its flags.
                names = [name for name in names if type(its[name]) is not bool]
            pairs = [(path, name) for name in names if (path := f"{place}.{name}".lstrip(".")) not in self._changed]
            if pairs:
                is_often = not _is_torchs(type(module)) or any(name in _OFTEN for name in names)
                values = self._often if is_often else self._seldom
                # With two keys or more it returns a tuple.
                keys = ["_parameters", *(name for _, name in pairs)]
                values.places.append((itemgetter(*keys), its))
                values.paths += [("", module, ""), *((path, module, name) for path, name in pairs)]
                values.seen += [its[key] for key in keys]
        self._sizes = self._sizes_now()

    def _sizes_now(self) -> list[int]:
        return [len(vars(module)) for _, module, _ in self._modules]

    def look(self, *, only_often: bool = False) -> dict[str, tuple[Any, Any]]:
        """Find values that have changed: the old and the new one by path, of each the first time.

        It takes 0.2 µs for each module if none has.
        """
        if not self._has_begun or (
            self._often.are_same() and (only_often or (self._seldom.are_same() and self._sizes == self._sizes_now()))
        ):
            return {}
        parts = (self._often, self._seldom)
        before = {path: value for one in parts for (path, *_), value in zip(one.paths, one.seen, strict=True)}
        self._note()
        found = {}
        for one in (self._often, self._seldom):
            for (path, module, name), value in zip(one.paths, one.seen, strict=True):
                if name and before.get(path) != value:
                    found[path] = before.get(path), value
                    self._changed[path] = module, name, one is self._often
        if found:
            self._note()
        return found

    def now(self, *, only_seldom: bool = False) -> State:
        """The present values of those that have changed, by path."""
        places = [(path, *place) for path, place in [*self._changed.items()]]
        values = [(path, vars(module).get(name)) for path, module, name, often in places if not (only_seldom and often)]
        return {path: value for path, value in values if _is_plain(value)}

    def load(self, values: State) -> list[str]:
        """Set these values. Returns the paths of those that were others."""
        places = {place: module for place, module, _ in self._modules}
        others = []
        for path, value in values.items():
            place, _, name = path.rpartition(".")
            if (module := places.get(place)) is not None:
                self._changed[path] = module, name, True
                if (old := vars(module).get(name)) != value or type(old) is not type(value):
                    others.append(path)
                    setattr(module, name, value)
        return others


def _counts(name: str, value: object, *, is_own: bool) -> bool:
    """Whether it is a value that a program sets. Private ones of libraries are their own business."""
    if name in _OF_MODULES or not _is_plain(value):
        return False
    return name[:1] != "_" or (is_own and type(value) in (int, float))


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or is_numpy_scalar(value)


def _is_programs(kind: type) -> bool:
    """Whether a class is the program's, and made from none of a library but torch's."""
    return not _is_torchs(kind) and not any(
        "site-packages" in _file(one) for one in kind.__mro__ if not _is_torchs(one)
    )


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _file(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
