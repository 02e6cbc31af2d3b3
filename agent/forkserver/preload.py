"""Imports what workers need into the process that will fork them, and records what the imports changed."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from elaunch.agent.forkserver.boot import Boot
from elaunch.agent.forkserver.fork_safety import why_not

# torch and numpy read these variables when they are imported. With other values BLAS would start its threads, and torch
# would open CUDA to see whether it is there; a process that forks must do neither. The children get the user's values.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass
class Brought:
    """What the import of `name` added: modules, and warning filters in front of the others.

    `readers` gives, for each variable that was looked up, the names of the modules that did so. `at_exit` are the calls
    that hidden modules wanted at Python's end. They are not registered yet.
    """

    name: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    filters: list[Any] = field(default_factory=list)
    readers: dict[str, set[str]] = field(default_factory=dict)
    at_exit: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class Preloaded:
    """The result of the imports. `restore` holds the variables that they changed, with the values from before."""

    restore: dict[str, str | None]
    brought: tuple[Brought, ...]

    def module(self, name: str) -> Any:
        """The loaded module of that name, whether it is hidden now or not. None if there is none."""
        return next((each.modules[name] for each in self.brought if name in each.modules), sys.modules.get(name))


class Unfaithful(Exception):
    """Workers must not be forked from here; its text is the reason."""


def hidden_packages(names: Collection[str]) -> set[str]:
    """The packages that a program is not to see before it imports them, where `names` are preloaded."""
    return {name.partition(".")[0] for name in names} | {"torch", "numpy"}


def preload(boot: Boot, loaded_at_start: Collection[str], customise: Callable[[], None]) -> Preloaded:
    """Run the user's customisation of Python (`customise`), then import. The garbage collector is off from then on.

    Raises Unfaithful if a forked worker would differ from a fresh interpreter.
    """
    assert boot.preload is not None
    custom = Brought("")
    with _recorded(custom, frozenset()):
        customise()
    before = dict(os.environ)
    os.environ.update(_WHILE_IMPORTING)
    # Imported objects stay: a garbage collection would find nothing, and takes a third of the time.
    gc.disable()
    hidden = hidden_packages(boot.preload)
    with _no_cache_folder():
        brought = tuple(_import(name, hidden) for name in boot.preload)
    looked_up = {variable for each in (custom, *brought) for variable in each.readers}
    if reason := why_not(boot.program, loaded_at_start, looked_up, boot.control_fd):
        raise Unfaithful(reason)
    # Imports also set variables. After torch._dynamo's import a script's own setdefault would have no effect.
    changed = {name for name in {*before, *os.environ} if os.environ.get(name) != before.get(name)}
    return Preloaded({name: before.get(name) for name in changed}, brought)


def _import(name: str, hidden: Collection[str]) -> Brought:
    modules, filters = dict(sys.modules), list(warnings.filters)
    brought = Brought(name)
    try:
        with _recorded(brought, hidden):
            importlib.import_module(name)
    except Exception as error:
        raise Unfaithful(f"importing {name} failed: {type(error).__name__}: {error}") from error
    brought.modules = {n: m for n, m in sys.modules.items() if n not in modules}
    brought.filters = [f for f in warnings.filters if f not in filters]
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
    """Note who looks up which variable in os.environ, and keep what `hidden` packages register for Python's end."""
    environ: Any = type(os.environ)
    lookup, register = environ.__getitem__, atexit.register
    is_on = True

    def recorded_lookup(self: Any, name: str) -> str:
        frame = sys._getframe(1)
        # A module of the standard library reads a variable for its caller.
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names:
            frame = frame.f_back
        brought.readers.setdefault(name, set()).add(frame.f_globals.get("__name__", ""))
        return lookup(self, name)  # type: ignore[no-any-return]

    def recorded_register(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        # A module may keep this function and call it after the recording has ended.
        if is_on and (getattr(call, "__module__", None) or "").partition(".")[0] in hidden:
            brought.at_exit.append((call, args, kwargs))
            return call
        return register(call, *args, **kwargs)

    environ.__getitem__, atexit.register = recorded_lookup, recorded_register
    try:
        yield
    finally:
        is_on = False
        environ.__getitem__, atexit.register = lookup, register


def restore_environment(variables: dict[str, str | None]) -> None:
    """Give `variables` their values; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
