"""Whether workers may be forked from a process that has imported what they need."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from elaunch.agent.environment import RANK_VARIABLES
from elaunch.rendezvous.job_spec import Program, ProgramKind

# What each zip file has near its end: before a comment of 64 KiB at most (APPNOTE 4.3.16).
_ZIP_END, _ZIP_END_BYTES = b"PK\5\6", (1 << 16) + 22
# By these variables an OpenMP runtime binds the process that loads it (GNU's) or that first uses it (Intel's).
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")


def why_not(program: Program, loaded_at_start: Collection[str], looked_up: Collection[str], control_fd: int) -> str:
    """The reason why workers must not be forked from this process, or the empty string.

    `loaded_at_start` are the modules of a bare interpreter. `looked_up` are the variables that were read since then.
    """
    if shadow := next(shadows(program, loaded_at_start), None):
        return f"{shadow[1]} has the name of a module that was preloaded"
    custom = [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    what = " or ".join([*custom, "a preloaded module"])
    if own := sorted(RANK_VARIABLES & set(looked_up)):
        return f"{what} looks up {own[0]}, which is another one in each worker"
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return f"{what} started a thread"
    # A worker closes all descriptors from 4 on, so a preloaded module would lose its open file or GPU.
    if held := next((path for fd, path in open_files().items() if fd not in {0, 1, 2, control_fd}), None):
        return f"{what} keeps {held} open"
    return f"{what} started CUDA" if cuda_is_on() else ""


def bound_by(cpus: Collection[int]) -> str:
    """A sentence on what has bound this process, which could use `cpus`, to fewer of them; empty if nothing has.

    A fresh interpreter has them all until its own import, and so have the processes that it starts before.
    """
    now = os.sched_getaffinity(0)
    if now == cpus:
        return ""
    named = {name: os.environ[name] for name in _BINDING if name in os.environ}
    by = ", ".join(f"{name}={value}" for name, value in named.items())
    done = f"the imports have bound the fork server to {len(now)} of {len(cpus)} CPUs{by and f' ({by})'}"
    faster = f", and without {' and '.join(named)} the start is fast" if named else ""
    return f"{done}; --no-preload avoids this warning{faster}"


def cuda_is_on() -> bool:
    """Whether this process uses CUDA: its children could not."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def open_files() -> dict[int, str]:
    """This process's open descriptors and what they refer to."""
    files: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The descriptor that listed the folder is closed by now.
        with suppress(OSError):
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def shadows(
    program: Program, loaded_at_start: Collection[str], modules: Mapping[str, ModuleType] | None = None
) -> Iterator[tuple[str, Path]]:
    """The modules in place of which a fresh interpreter would import a file beside the program, and these files.

    `modules` are all that are loaded, if some are hidden now.
    """
    modules = sys.modules if modules is None else modules
    loaded = {name for name in modules if "." not in name} - set(loaded_at_start) - set(sys.builtin_module_names)
    suffixes = ["/", *importlib.machinery.all_suffixes()]
    place = _programs_place(program)
    for entry in _entries(place) if place else ():
        # A folder without __init__.py does not count: Python prefers a module elsewhere.
        suffix = next((s for s in suffixes if entry.endswith(s)), None)
        if suffix and (name := entry.removesuffix(suffix)) in loaded:
            ours = getattr(modules[name], "__file__", None)
            if ours is None or not Path(ours).is_relative_to(place):
                yield name, Path(place, entry)


def _programs_place(program: Program) -> str:
    """The folder or zip file that Python will put first on `sys.path` for the program, or the empty string."""
    is_safe = getattr(sys.flags, "safe_path", False)
    if program.kind is ProgramKind.SCRIPT and not program.is_on_stdin:
        if os.path.isdir(program.target) or _is_zip(program.target):  # noqa: PTH112
            return os.path.abspath(program.target)  # noqa: PTH100
        return "" if is_safe else os.path.dirname(os.path.realpath(program.target))  # noqa: PTH120
    return "" if is_safe else os.getcwd()  # noqa: PTH109


def _is_zip(file: str) -> bool:
    try:
        with open(file, "rb") as content:  # noqa: PTH123
            end = content.seek(0, os.SEEK_END)
            content.seek(max(0, end - _ZIP_END_BYTES))
            if _ZIP_END not in content.read():
                return False
    except OSError:
        return False
    # Imported here: it takes 2 ms, and most programs are plain files.
    import zipfile

    return zipfile.is_zipfile(file)


def _entries(place: str) -> Iterator[str]:
    """The names of the module files in a folder or zip file. A package's name ends in a slash."""
    with suppress(OSError):
        if os.path.isfile(place):  # noqa: PTH113
            yield from _entries_of_zip(place)
            return
        for entry in os.scandir(place):
            is_package = entry.is_dir() and Path(entry.path, "__init__.py").exists()
            yield f"{entry.name}/" if is_package else entry.name


def _entries_of_zip(place: str) -> Iterator[str]:
    import zipfile

    with suppress(zipfile.BadZipFile), zipfile.ZipFile(place) as archive:
        names = archive.namelist()
        yield from (name for name in names if "/" not in name)
        yield from (name.removesuffix("__init__.py") for name in names if name.count("/") == 1)
