"""Imports what workers need into the process that will fork them, and records what the imports changed."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from elaunch.agent.default_preload import PACKAGES
from elaunch.agent.environment import RANK_VARIABLES
from elaunch.agent.forkserver import fixups
from elaunch.agent.forkserver.boot import Boot
from elaunch.agent.forkserver.fork_safety import why_not
from elaunch.agent.forkserver.lookups import EnvironmentCopies, keeper, walks

# torch and numpy read these variables when they are imported. With other values BLAS would start its threads, and torch
# would open CUDA to see whether it is there; a process that forks must do neither. The children get the user's values.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_DEFAULT = ("torch", "elaunch")


@dataclass
class Brought:
    """What the import of `name` added: modules, and warning filters in front of the others.

    `sets` are the variables that it set or removed. `looked_up` are the variables that were looked up, `asked` those of
    them that were looked up by name, not by a walk through all. `readers` gives, for each that a module has kept, the
    names of these modules. `at_exit` are the calls that hidden modules wanted at Python's end. They are not registered
    yet. `is_package` says that it is of PACKAGES, and may have imported what comes before it.
    """

    name: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    filters: list[Any] = field(default_factory=list)
    sets: dict[str, str | None] = field(default_factory=dict)
    looked_up: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    readers: dict[str, set[str]] = field(default_factory=dict)
    at_exit: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    is_package: bool = False


@dataclass(frozen=True)
class Preloaded:
    """The result of the imports. `restore` holds the variables that they changed, with the values from before.

    `asked` are the variables that were looked up by name, `customised` those that the user's customisation of Python
    has set or removed.
    """

    restore: dict[str, str | None]
    brought: tuple[Brought, ...]
    asked: frozenset[str] = frozenset()
    customised: Mapping[str, str | None] = field(default_factory=dict)

    def module(self, name: str) -> Any:
        """The loaded module of that name, whether it is hidden now or not. None if there is none."""
        return next((each.modules[name] for each in self.brought if name in each.modules), sys.modules.get(name))


class Unfaithful(Exception):
    """Workers must not be forked from here; its text is the reason.

    `rest` are the modules that a new process may import nevertheless; None if it may import nothing.
    """

    def __init__(self, reason: str, rest: tuple[str, ...] | None = None) -> None:
        super().__init__(reason)
        self.rest = rest


def hidden_packages(names: Collection[str]) -> set[str]:
    """The packages that a program is not to see before it imports them, where `names` are preloaded."""
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names | {"torch", "numpy"}


def preload(boot: Boot, loaded_at_start: Collection[str], customise: Callable[[], None]) -> Preloaded:
    """Run the user's customisation of Python (`customise`), then import. The garbage collector is off from then on.

    Raises Unfaithful if a forked worker would differ from a fresh interpreter.
    """
    assert boot.preload is not None
    custom = Brought("")
    given = dict(os.environ)
    with _recorded(custom, frozenset()):
        customise()
    before = dict(os.environ)
    os.environ.update(_WHILE_IMPORTING)
    for variable, value in fixups.UNLESS_SET.items():
        os.environ.setdefault(variable, value)
    # Imported objects stay: a garbage collection would find nothing, and takes a third of the time.
    gc.disable()
    with _no_cache_folder():
        brought = _all_imports(boot, loaded_at_start, custom)
    # Imports also set variables. After torch._dynamo's import a script's own setdefault would have no effect.
    asked = frozenset(name for each in (custom, *brought) for name in each.asked)
    return Preloaded(_others(os.environ, before), brought, asked, _others(given, before))


def _others(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ, with their values in `second`; None for one that is not there."""
    return {name: second.get(name) for name in {*first, *second} if first.get(name) != second.get(name)}


def _all_imports(boot: Boot, loaded_at_start: Collection[str], custom: Brought) -> tuple[Brought, ...]:
    """Import the default, then what else `boot` names. After each of the two it is checked what that has done."""
    names = boot.preload or ()
    packages = [name for name in boot.packages if find_spec(name.partition(":")[0].partition(".")[0])]
    hidden = hidden_packages((*names, *(name.partition(":")[0] for name in packages)))
    first = tuple(name for name in names if name.partition(".")[0] in _DEFAULT)
    others = [name for name in names if name not in first]
    if (others or packages) and find_spec("torch") is None:
        # The default, which nobody asked for: there is no torch to lose.
        first = tuple(name for name in first if name.partition(".")[0] != "torch")
    brought = [_import(name, hidden) for name in first]
    _check(boot, loaded_at_start, (custom, *brought), None)
    try:
        brought += [_import(name, hidden) for name in (*others, *packages)]
        if others or packages:
            _check(boot, loaded_at_start, (custom, *brought), first)
    except Unfaithful as error:
        raise Unfaithful(str(error), first) from error
    return tuple(brought)


def _check(
    boot: Boot, loaded_at_start: Collection[str], brought: Iterable[Brought], rest: tuple[str, ...] | None
) -> None:
    """Raises Unfaithful if a worker that is forked now would differ from a fresh interpreter."""
    looked_up = {variable for each in brought for variable in each.looked_up}
    if reason := why_not(boot.program, loaded_at_start, looked_up, boot.control_fd):
        raise Unfaithful(reason, rest)


def _import(name: str, hidden: Collection[str]) -> Brought:
    """Import MODULE or MODULE:NAME. Raises Unfaithful."""
    module, _, wanted = name.partition(":")
    modules, filters, before = dict(sys.modules), list(warnings.filters), dict(os.environ)
    brought = Brought(module, is_package=module.partition(".")[0] in PACKAGES)
    try:
        with _recorded(brought, hidden):
            importlib.import_module(module)
            if wanted:
                # The name may be another version's. Of a lazy package it is what brings the modules.
                with suppress(AttributeError):
                    getattr(sys.modules[module], wanted)
    except (Exception, SystemExit) as error:
        raise Unfaithful(f"importing {module} failed: {type(error).__name__}: {error}") from error
    brought.modules = {n: m for n, m in sys.modules.items() if n not in modules}
    brought.filters = [f for f in warnings.filters if f not in filters]
    if module.partition(".")[0] not in _DEFAULT:
        now = dict(os.environ)
        brought.sets = {n: now.get(n) for n in {*before, *now} if before.get(n) != now.get(n)}
    return brought


@contextmanager
def _no_cache_folder() -> Iterator[None]:
    """Keep torch._inductor's import from making its cache folder: a program that never compiles would not have one."""
    makedirs: Any = os.makedirs
    is_on = True

    def unless_inductors(name: Any, *args: Any, **kwargs: Any) -> None:
        if not (is_on and os.path.basename(os.fspath(name)).startswith("torchinductor_")):  # noqa: PTH119
            makedirs(name, *args, **kwargs)

    os.makedirs = unless_inductors
    try:
        yield
    finally:
        is_on = False
        os.makedirs = makedirs


@contextmanager
def _recorded(brought: Brought, hidden: Collection[str]) -> Iterator[None]:
    """Note who looks up which variable in os.environ.

    What `hidden` packages register for Python's end is kept.
    """
    environ: Any = type(os.environ)
    lookup, register, all_names = environ.__getitem__, atexit.register, environ.keys
    is_on = True
    copies = EnvironmentCopies()

    def recorded_lookup(self: Any, name: str) -> str:
        frame = sys._getframe(1)
        if name in RANK_VARIABLES and brought.is_package:
            # What it keeps of the rank is found out again (`fixups`).
            return lookup(self, name)  # type: ignore[no-any-return]
        brought.looked_up.add(name)
        if not copies.has(frame):
            if not walks(frame):
                brought.asked.add(name)
            if reader := keeper(name, frame):
                brought.readers.setdefault(name, set()).add(reader)
        return lookup(self, name)  # type: ignore[no-any-return]

    def recorded_register(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        # A module may keep this function and call it after the recording has ended.
        if is_on and (getattr(call, "__module__", None) or "").partition(".")[0] in hidden:
            brought.at_exit.append((call, args, kwargs))
            return call
        return register(call, *args, **kwargs)

    environ.__getitem__, atexit.register = recorded_lookup, recorded_register
    environ.keys = copies.watched(all_names)
    try:
        yield
    finally:
        is_on = False
        environ.__getitem__, atexit.register = lookup, register
        del environ.keys


def restore_environment(variables: Mapping[str, str | None]) -> None:
    """Give `variables` their values; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
