"""Imports what workers need into the process that will fork them, and looks whether that may be forked."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from elaunch.agent.boot import Boot

# Read when torch or numpy is imported, and wrong for a process that forks: BLAS would start its threads, torch would
# open CUDA to see whether it is there. The children get the user's values back.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# The modules that read the environment on somebody's behalf.
_READERS = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class Brought:
    """What came with the import of `name`, beyond what was there: modules, and filters in front of the others.

    `readers` has, for each variable that was looked up, the names of the modules that did so.
    """

    name: str
    modules: dict[str, ModuleType]
    filters: list[Any]
    readers: dict[str, set[str]]


@dataclass(frozen=True)
class Preloaded:
    """What importing has left; `restore` is what it changed in the environment, with the values from before."""

    restore: dict[str, str | None]
    brought: tuple[Brought, ...]


class Unfaithful(Exception):
    """Workers must not be forked from here; its text is the reason."""


def preload(boot: Boot, loaded_at_start: Collection[str], customise: Callable[[], None]) -> Preloaded:
    """Run the user's customisation of Python (`customise`), then import.

    Raises Unfaithful where a forked worker would not be what a fresh interpreter is; the environment is as before then.
    """
    assert boot.preload is not None
    files = _open_files().keys()
    customise()
    before = dict(os.environ)
    os.environ.update(_WHILE_IMPORTING)
    brought: list[Brought] = []
    # All of it stays: looking for garbage would find none, and takes a tenth of the time.
    gc.disable()
    try:
        for name in boot.preload:
            brought.append(_import(name))
        reason = _reason(boot, loaded_at_start, files)
    except Exception as error:
        reason = f"importing {name} failed: {type(error).__name__}: {error}"
    # torch._inductor makes its cache folder when it is imported; a script that never compiles would not have it.
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR") if "TORCHINDUCTOR_CACHE_DIR" not in before else None:
        with suppress(OSError):
            os.rmdir(cache)  # noqa: PTH106
    # Imports write variables too; after torch._dynamo's a script's own setdefault would come too late.
    restore = {n: before.get(n) for n in {*before, *os.environ} if os.environ.get(n) != before.get(n)}
    if reason:
        restore_environment(restore)
        raise Unfaithful(reason)
    gc.freeze()
    gc.enable()
    return Preloaded(restore, tuple(brought))


def _import(name: str) -> Brought:
    modules, filters = dict(sys.modules), list(warnings.filters)
    readers: dict[str, set[str]] = {}
    with _recorded(readers):
        importlib.import_module(name)
    return Brought(
        name,
        {n: m for n, m in sys.modules.items() if n not in modules},
        [f for f in warnings.filters if f not in filters],
        readers,
    )


def restore_environment(variables: dict[str, str | None]) -> None:
    """Give `variables` their values; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _reason(boot: Boot, loaded_at_start: Collection[str], files: Collection[int]) -> str:
    """Why workers must not be forked from here, or the empty string."""
    if shadow := _shadow(Path(boot.script_dir), loaded_at_start) if boot.script_dir else None:
        return f"{shadow} has the name of a module that was preloaded"
    custom = [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    what = " or ".join([*custom, "a preloaded module"])
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return f"{what} started a thread"
    # A worker's descriptors are its own from 4 on: what a module holds open, a GPU or a file, would be taken from it.
    if held := next((path for fd, path in _open_files().items() if fd not in files), None):
        return f"{what} keeps {held} open"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"{what} started CUDA"
    return ""


@contextmanager
def _recorded(readers: dict[str, set[str]]) -> Iterator[None]:
    """Note who looks up which variable in os.environ."""
    environ: Any = type(os.environ)
    lookup = environ.__getitem__

    def recorded(self: Any, name: str) -> str:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _READERS:
            frame = frame.f_back
        readers.setdefault(name, set()).add(frame.f_globals.get("__name__", ""))
        return lookup(self, name)  # type: ignore[no-any-return]

    environ.__getitem__ = recorded
    try:
        yield
    finally:
        environ.__getitem__ = lookup


def _open_files() -> dict[int, str]:
    """This process's open descriptors and what they refer to."""
    files: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The one that listed them is gone by now.
        with suppress(OSError):
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def _shadow(script_dir: Path, loaded_at_start: Collection[str]) -> Path | None:
    """A file beside the script that a fresh interpreter would import in place of what was preloaded, if any."""
    loaded = {name for name in sys.modules if "." not in name} - set(loaded_at_start) - set(sys.builtin_module_names)
    suffixes = importlib.machinery.all_suffixes()
    try:
        entries = list(os.scandir(script_dir))
    except OSError:
        return None
    for entry in entries:
        suffix = next((s for s in suffixes if entry.name.endswith(s)), None)
        name = entry.name.removesuffix(suffix) if suffix else entry.name
        if name in loaded and (suffix or (Path(entry.path) / "__init__.py").exists()):
            ours = getattr(sys.modules[name], "__file__", None)
            if ours is None or not Path(ours).is_relative_to(script_dir):
                return Path(entry.path)
    return None
