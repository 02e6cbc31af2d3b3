"""Imports what workers need into the process that will fork them, and records what the imports changed."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from elaunch.agent.environment import RANK_VARIABLES
from elaunch.agent.forkserver.boot import Boot
from elaunch.agent.forkserver.fork_safety import why_not
from elaunch.agent.forkserver.kept_at_import import OwnHandler, RankStatement, handlers_noted, rank_statement
from elaunch.agent.forkserver.learned import Named
from elaunch.agent.forkserver.lookups import FOLDER, EnvironmentCopies, keeper, keeper_of_folder, walks
from elaunch.agent.forkserver.selection import Selection
from elaunch.records import dataclass, field, replace

# torch and numpy read these variables when they are imported. With other values BLAS would start its threads, and torch
# would open CUDA to see whether it is there; a process that forks must do neither. The children get the user's values.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# pyarrow's allocator would start a thread when it is imported. A user's own value stays.
_UNLESS_SET = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# These are known to suit: elaunch's tests preload them. All other packages are tried in another process first.
_KNOWN = ("torch", "elaunch")
_REASONS_MAX = 3
_WORTH_SAYING_S = 0.05
# Of one CPU, for imports while a job runs: they wait three times as long as they work.
_WAIT_PER_WORK = 3.0
_WORK_S_MIN = 0.01


@dataclass
class Brought:
    """What the import of `name` added: modules, and warning filters in front of the others.

    `sets` are the variables that it set or removed. `looked_up` are the variables that were looked up, `asked` those of
    them that were looked up by name, not by a walk through all. `readers` gives, for each that a module has kept, the
    names of these modules. `at_exit` are the calls that hidden modules wanted at Python's end. They are not registered
    yet. `ranks` and `handlers` are what modules have found out that workers find out again. `is_learned` says that an
    earlier run of the program has imported it, after those that come before it.
    """

    name: str
    modules: dict[str, ModuleType] = field(default_factory=dict)
    filters: list[Any] = field(default_factory=list)
    sets: dict[str, str | None] = field(default_factory=dict)
    looked_up: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    readers: dict[str, set[str]] = field(default_factory=dict)
    at_exit: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    ranks: dict[str, RankStatement] = field(default_factory=dict)
    handlers: list[OwnHandler] = field(default_factory=list)
    is_learned: bool = False


@dataclass(frozen=True)
class Preloaded:
    """The result of the imports. `restore` holds the variables that they changed, with the values from before.

    `left_out` has a sentence for each name of which not all could be imported. `tried` are the selections for names of
    --preload. `has_programs` says that what the program imports was known, and is there. `asked` are the variables that
    were looked up by name, `customised` those that the user's customisation of Python has set or removed.
    """

    restore: dict[str, str | None]
    brought: tuple[Brought, ...]
    left_out: tuple[str, ...] = ()
    tried: tuple[Named, ...] = ()
    has_programs: bool = False
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


class _LeftOut(BaseException):
    """A module is about to be imported that must not run here. No module that expects an ImportError may catch this."""


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
    for variable, value in _UNLESS_SET.items():
        os.environ.setdefault(variable, value)
    # Imported objects stay: a garbage collection would find nothing, and takes a third of the time.
    gc.disable()
    with _no_cache_folder(), _paced() if boot.is_paced else nullcontext():
        told = _all_imports(boot, loaded_at_start, custom)
    # Imports also set variables. After torch._dynamo's import a script's own setdefault would have no effect.
    asked = frozenset(name for each in (custom, *told.brought) for name in each.asked)
    restore = _others(os.environ, before)
    return replace(told, restore=restore, asked=asked, customised=_others(given, before))


def _others(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ, with their values in `second`; None for one that is not there."""
    return {name: second.get(name) for name in {*first, *second} if first.get(name) != second.get(name)}


def _all_imports(boot: Boot, loaded_at_start: Collection[str], custom: Brought) -> Preloaded:
    """Import what is known to suit, then what `boot` names, then what the program is known to import."""
    names, programs = boot.preload or (), boot.learned.program
    hidden = hidden_packages((*names, *programs.entries))
    known = tuple(name for name in names if _is_known(name))
    others = [name for name in names if name not in known]
    if others and find_spec("torch") is None:
        # The default, which nobody asked for: there is no torch to lose.
        known = tuple(name for name in known if name.partition(".")[0] != "torch")
    first = [custom, *(_import(name, (name,), hidden) for name in known)]
    _check(boot, loaded_at_start, first, None)
    more, tried, sentences, left_out = [], [], [], {*programs.left_out}
    try:
        for name in others:
            selection, sentence = _chosen(name, boot, loaded_at_start)
            sentences += [sentence] if sentence else []
            if selection.entries:
                tried.append(Named(name, selection))
                left_out |= {*selection.left_out}
                with _kept_out(left_out):
                    more.append(_import(name, selection.entries, hidden))
        for name in programs.entries:
            if name not in sys.modules:
                with _kept_out(left_out):
                    more.append(_import(name, (name,), hidden))
                more[-1].is_learned = True
        if more:
            _check(boot, loaded_at_start, (*first, *more), known)
            _check_variables(boot.learned.variables, more)
    except Unfaithful as error:
        raise Unfaithful(str(error), known) from error
    return Preloaded({}, (*first[1:], *more), tuple(sentences), tuple(tried), bool(programs.entries))


def _check_variables(variables: Collection[str], brought: Iterable[Brought]) -> None:
    """Raises Unfaithful if a module has kept the value of a variable that the program sets before its imports."""
    own = {name for each in brought for name in each.sets}
    for each in brought:
        if kept := sorted(each.readers.keys() & set(variables) - own):
            raise Unfaithful(f"{each.name} looks up {kept[0]}, which the program sets")


def _is_known(name: str) -> bool:
    return name.partition(".")[0] in _KNOWN or name in sys.modules


@contextmanager
def _paced() -> Iterator[None]:
    """Wait after each import for longer than it took: a job runs on these CPUs.

    A lower priority would not do: the workers that are forked later could not have a higher one again.
    """
    system: Any = importlib._bootstrap
    load_unlocked = system._load_unlocked
    waited_s = time.process_time()

    def paced(spec: Any) -> Any:
        nonlocal waited_s
        module = load_unlocked(spec)
        work_s = time.process_time() - waited_s
        if work_s > _WORK_S_MIN:
            time.sleep(_WAIT_PER_WORK * work_s)
            waited_s = time.process_time()
        return module

    system._load_unlocked = paced
    try:
        yield
    finally:
        system._load_unlocked = load_unlocked


def _check(
    boot: Boot, loaded_at_start: Collection[str], brought: Iterable[Brought], rest: tuple[str, ...] | None
) -> None:
    """Raises Unfaithful if a worker that is forked now would differ from a fresh interpreter."""
    looked_up = {variable for each in brought for variable in each.looked_up}
    if reason := why_not(boot.program, loaded_at_start, looked_up, boot.control_fd):
        raise Unfaithful(reason, rest)


def _chosen(name: str, boot: Boot, loaded_at_start: Collection[str]) -> tuple[Selection, str]:
    """What to import for `name`, and a sentence about what is left out."""
    from elaunch.agent.forkserver.probe import Unsuited, probe

    try:
        selection = boot.learned.selection(name) or probe(name, boot.program, loaded_at_start)
    except Unsuited as error:
        return Selection(), f"{name} is not preloaded, each worker imports it itself: {error}"
    count = len(selection.left_out)
    if not count:
        return selection, ""
    which = "it" if count == 1 else f"{count} modules"
    took = f" ({selection.left_out_s:.1f} s)" if selection.left_out_s >= _WORTH_SAYING_S else ""
    text = f"{name} is preloaded without {which}, which each worker imports itself{took}"
    if not selection.entries or selection.left_out == (name,):
        # What it needs may be preloaded.
        text = f"{name} is not preloaded, each worker imports it itself{took}"
    return selection, f"{text}: {'; '.join(selection.reasons[:_REASONS_MAX])}"


@contextmanager
def _kept_out(names: Collection[str]) -> Iterator[None]:
    """Let no import run one of the modules `names`. Raises Unfaithful if one was asked for, also if that was caught."""
    asked: list[str] = []

    class Guard:
        # Code that only asks whether a module is there gets the answer of a worker. The module does not run.
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name not in names:
                return None
            finders = [getattr(each, "find_spec", None) for each in sys.meta_path if each is not self]
            spec = next((spec for find in finders if find and (spec := find(name, path, target))), None)
            if spec is not None:
                spec.loader = Refusing(spec.loader)
            return spec

    class Refusing:
        def __init__(self, loader: Any) -> None:
            self._loader = loader

        def __getattr__(self, name: str) -> Any:
            return getattr(self._loader, name)

        def create_module(self, spec: Any) -> None:
            asked.append(spec.name)
            raise _LeftOut(spec.name)

        def exec_module(self, module: Any) -> None:
            """Never called: there is no module to execute."""

    guard = Guard()
    sys.meta_path.insert(0, guard)
    try:
        yield
    except _LeftOut:
        pass
    finally:
        sys.meta_path.remove(guard)
    if asked:
        raise Unfaithful(f"{asked[0]} is imported only now and then")


def _import(name: str, entries: Iterable[str], hidden: Collection[str]) -> Brought:
    """Import `entries`, which are `name` itself or what of it can be preloaded. Raises Unfaithful."""
    modules, filters, before = dict(sys.modules), list(warnings.filters), dict(os.environ)
    brought = Brought(name)
    try:
        with _recorded(brought, hidden), nullcontext() if _is_known(name) else handlers_noted(brought.handlers):
            for entry in entries:
                importlib.import_module(entry)
    except Exception as error:
        raise Unfaithful(f"importing {name} failed: {type(error).__name__}: {error}") from error
    brought.modules = {n: m for n, m in sys.modules.items() if n not in modules}
    brought.filters = [f for f in warnings.filters if f not in filters]
    if name.partition(".")[0] not in _KNOWN:
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
    """Note who looks up which variable in os.environ, and who asks for the current folder.

    What `hidden` packages register for Python's end is kept.
    """
    environ: Any = type(os.environ)
    lookup, register, all_names, getcwd = environ.__getitem__, atexit.register, environ.keys, os.getcwd
    is_on = True
    copies = EnvironmentCopies()

    def recorded_lookup(self: Any, name: str) -> str:
        frame = sys._getframe(1)
        # Such a statement looks up more variables if it does not find the first one.
        if brought.name and (name in RANK_VARIABLES or brought.ranks) and (statement := rank_statement(frame)):
            brought.ranks[statement.module] = statement
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

    def recorded_getcwd() -> str:
        if is_on and (reader := keeper_of_folder(sys._getframe(1))):
            brought.readers.setdefault(FOLDER, set()).add(reader)
        return getcwd()

    os.getcwd = recorded_getcwd
    environ.__getitem__, atexit.register = recorded_lookup, recorded_register
    environ.keys = copies.watched(all_names)
    try:
        yield
    finally:
        is_on = False
        environ.__getitem__, atexit.register, os.getcwd = lookup, register, getcwd
        del environ.keys


def restore_environment(variables: Mapping[str, str | None]) -> None:
    """Give `variables` their values; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
