"""Imports what workers need into the process that will fork them, records what that changed, and checks the process."""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import os
import site
import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from elaunch.agent.environment import PACKAGES, RANK_VARIABLES
from elaunch.agent.forkserver.wire import Boot
from elaunch.rendezvous.types import Program, ProgramKind

# torch and numpy read these variables when they are imported. With other values BLAS would start its threads, and torch
# would open CUDA to detect it; a process that forks must do neither. The children get the user's values.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# pyarrow's allocator would start a thread when it is imported. A user's own value stays.
_UNLESS_SET = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_DEFAULT = ("torch", "elaunch")
# By these variables an OpenMP runtime binds the process that loads it (GNU's) or that first uses it (Intel's).
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")

# A worker's link and crash file get these numbers. The hook reserves them.
_RESERVED_FDS = (3, 4)
# In characters: the reason goes into one packet, and into one line of the log.
_REASON_MAX = 2000

AtExit = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Preloaded:
    """The changes that the imports made.

    `hidden` are the modules that a program is not to see before it imports one of them. With them come `filters` of
    warnings, calls at exit (`at_exit`), and the variables that the imports of packages set or removed (`sets`).
    `restore` are all variables that the imports changed, with the values from before. `looked_up` are those that were
    read by name. `kept_fds` are descriptors that a worker must not close.
    """

    hidden: dict[str, ModuleType]
    filters: list[Any] = field(default_factory=list)
    at_exit: list[AtExit] = field(default_factory=list)
    sets: dict[str, str | None] = field(default_factory=dict)
    restore: dict[str, str | None] = field(default_factory=dict)
    looked_up: frozenset[str] = frozenset()
    kept_fds: frozenset[int] = frozenset()

    def module(self, name: str) -> Any:
        """The loaded module of that name, whether it is hidden or not. None if there is none."""
        return self.hidden.get(name, sys.modules.get(name))


class Unfaithful(Exception):
    """A worker that is forked from here would differ from a fresh interpreter; the text is the reason."""


def preload(boot: Boot, loaded_at_start: Collection[str], cpus: Collection[int]) -> Preloaded:
    """Run the user's customisation of Python, then import. Raises Unfaithful.

    `loaded_at_start` are the modules of a bare interpreter, `cpus` those that this process could use before.
    """
    names = list(_names(boot))
    # Packages of the short list count even if another one imported them: each worker sets its rank in them.
    packages = {_top(name) for name in names} - sys.stdlib_module_names | {"torch", "numpy"} | PACKAGES
    looked_up, at_exit = set[str](), list[AtExit]()
    python: Any = site
    with _recorded(looked_up, at_exit, ()):
        # As Python would have here (Lib/site.py, main).
        python.execsitecustomize()
        if site.ENABLE_USER_SITE:
            python.execusercustomize()
    before, modules, filters = dict(os.environ), set(sys.modules), list(warnings.filters)
    os.environ.update(_WHILE_IMPORTING)
    for variable, value in _UNLESS_SET.items():
        os.environ.setdefault(variable, value)
    sets: dict[str, str | None] = {}
    for name in names:
        then, found = dict(os.environ), set[str]()
        with _recorded(found, at_exit, packages):
            _import(name)
        if _top(name) not in _DEFAULT:
            sets |= _changes(then, os.environ)
        # Each worker sets again what a package of the short list stores of the rank (after_fork.py).
        looked_up |= found - RANK_VARIABLES if _top(name) in PACKAGES else found
    kept_fds = _check(boot, loaded_at_start, looked_up, cpus)
    return Preloaded(
        {n: module for n, module in sys.modules.items() if n not in modules and _top(n) in packages},
        [each for each in warnings.filters if each not in filters],
        at_exit,
        sets,
        _changes(os.environ, before),
        frozenset(looked_up),
        kept_fds,
    )


def default_of(boot: Boot) -> tuple[str, ...] | None:
    """The preloads that the user did not name, torch and elaunch's program, if there are others; else None."""
    first = tuple(name for name in boot.preload or () if _top(name) in _DEFAULT)
    return first if first and (boot.packages or first != boot.preload) else None


def _names(boot: Boot) -> Iterator[str]:
    """The modules to import, MODULE or MODULE:NAME, in order."""
    names = boot.preload or ()
    first = default_of(boot) or ()
    # torch may not be installed: the user did not name it.
    yield from (name for name in first if _top(name) != "torch" or find_spec("torch"))
    yield from (name for name in names if name not in first)
    yield from (name for name in boot.packages if find_spec(_top(name)))


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _import(name: str) -> None:
    """Import MODULE or MODULE:NAME. Raises Unfaithful."""
    module, _, wanted = name.partition(":")
    try:
        importlib.import_module(module)
        if wanted:
            # This version may lack the name. In a package with lazy imports the lookup imports the modules.
            with suppress(AttributeError):
                getattr(sys.modules[module], wanted)
    except (Exception, SystemExit) as error:
        raise Unfaithful(f"importing {module} failed: {type(error).__name__}: {error}"[:_REASON_MAX]) from error


def _changes(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ, with their values in `second`; None for one that is not there."""
    return {name: second.get(name) for name in {*first, *second} if first.get(name) != second.get(name)}


@contextmanager
def _recorded(looked_up: set[str], at_exit: list[AtExit], packages: Collection[str]) -> Iterator[None]:
    """Record which variables are looked up by name in os.environ, and what `packages` register for Python's exit.

    Those calls are not registered yet: the program may never import the packages.
    """
    environ: Any = type(os.environ)
    lookup, register = environ.__getitem__, atexit.register
    is_on = True

    def recorded_lookup(self: Any, name: str) -> str:
        # Code that iterates over all variables, as tqdm does when it is imported, searches for names of its own.
        if sys._getframe(1).f_code.co_name not in ("__iter__", "copy"):
            looked_up.add(name)
        return lookup(self, name)  # type: ignore[no-any-return]

    def recorded_register(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        # A module may keep this function and call it after the recording has ended.
        if is_on and _top(getattr(call, "__module__", None) or "") in packages:
            at_exit.append((call, args, kwargs))
            return call
        return register(call, *args, **kwargs)

    environ.__getitem__, atexit.register = recorded_lookup, recorded_register
    try:
        yield
    finally:
        is_on = False
        environ.__getitem__, atexit.register = lookup, register


def restore_environment(variables: Mapping[str, str | None]) -> None:
    """Give `variables` their values; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _check(
    boot: Boot, loaded_at_start: Collection[str], looked_up: Collection[str], cpus: Collection[int]
) -> frozenset[int]:
    """Check that this process has one thread, no CUDA, no open file, and nothing of a rank. Raises Unfaithful.

    Returns the descriptors that workers keep: of files that are mapped as code. libffi (3.5) maps more of its own file
    for later callbacks.
    """
    if shadow := next(shadows(boot.program, loaded_at_start), None):
        raise Unfaithful(f"{shadow} has the name of a module that was preloaded")
    custom = [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    what = " or ".join([*custom, "a preloaded module"])
    if own := sorted(RANK_VARIABLES & set(looked_up)):
        raise Unfaithful(f"{what} looks up {own[0]}, which has another value in each worker")
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        raise Unfaithful(f"{what} started a thread")
    # A worker closes all others, so a preloaded module would lose its open file or GPU.
    files, code = open_files().items() - {(fd, os.devnull) for fd in _RESERVED_FDS}, libraries()
    kept_fds = frozenset(fd for fd, path in files if path in code and fd not in _RESERVED_FDS)
    if held := next((path for fd, path in files if fd not in {0, 1, 2, boot.control_fd, *kept_fds}), None):
        raise Unfaithful(f"{what} keeps {held} open")
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        raise Unfaithful(f"{what} started CUDA")
    # A fresh interpreter has all CPUs until its own import, and so have the processes that it starts before.
    if (now := os.sched_getaffinity(0)) != cpus:
        named = {name: os.environ[name] for name in _BINDING if name in os.environ}
        by = ", ".join(f"{name}={value}" for name, value in named.items())
        done = f"the imports have bound the fork server to {len(now)} of {len(cpus)} CPUs{by and f' ({by})'}"
        faster = f", and without {' and '.join(named)} the start is fast" if named else ""
        raise Unfaithful(f"{done}; --no-preload avoids this warning{faster}")
    return kept_fds


def open_files() -> dict[int, str]:
    """This process's open descriptors and what they refer to."""
    files: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The descriptor that listed the folder has been closed.
        with suppress(OSError):
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def libraries() -> set[str]:
    """The files that are mapped into this process as code."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:  # noqa: PTH123
        lines = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    return {fields[5] for fields in lines if len(fields) == 6 and fields[5].startswith("/") and "x" in fields[1]}


def shadows(
    program: Program, loaded_at_start: Collection[str], modules: Mapping[str, ModuleType] | None = None
) -> Iterator[Path]:
    """The files beside the program that a fresh interpreter would import in place of a loaded module.

    `modules` are all that are loaded, if some are hidden now.
    """
    modules = sys.modules if modules is None else modules
    loaded = {name for name in modules if "." not in name} - set(loaded_at_start) - set(sys.builtin_module_names)
    suffixes = ["/", *importlib.machinery.all_suffixes()]
    place = programs_place(program)
    for entry in _entries(place) if place else ():
        # A folder without __init__.py does not count: Python prefers a module elsewhere.
        suffix = next((s for s in suffixes if entry.endswith(s)), None)
        if suffix and (name := entry.removesuffix(suffix)) in loaded:
            ours = getattr(modules[name], "__file__", None)
            # Installed packages may be below the program's folder.
            if ours is None or Path(os.path.realpath(ours)).parent not in (Path(place), Path(place, name)):
                yield Path(place, entry)


def programs_place(program: Program) -> str:
    """The folder or zip file that Python will put first on `sys.path` for the program, or the empty string."""
    is_safe = getattr(sys.flags, "safe_path", False)
    if program.kind is ProgramKind.SCRIPT and not program.is_on_stdin:
        if os.path.isdir(program.target) or zipfile.is_zipfile(program.target):  # noqa: PTH112
            return os.path.abspath(program.target)  # noqa: PTH100
        return "" if is_safe else os.path.dirname(os.path.realpath(program.target))  # noqa: PTH120
    return "" if is_safe else os.getcwd()  # noqa: PTH109


def _entries(place: str) -> Iterator[str]:
    """The names of the module files in a folder or zip file. A package's name ends in a slash."""
    with suppress(OSError, zipfile.BadZipFile):
        if os.path.isfile(place):  # noqa: PTH113
            with zipfile.ZipFile(place) as archive:
                names = archive.namelist()
            yield from (name for name in names if "/" not in name)
            yield from (name.removesuffix("__init__.py") for name in names if name.count("/") == 1)
            return
        for entry in os.scandir(place):
            is_package = entry.is_dir() and Path(entry.path, "__init__.py").exists()
            yield f"{entry.name}/" if is_package else entry.name
