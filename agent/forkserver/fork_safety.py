"""Whether workers may be forked from a process that has imported what they need."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from elaunch.agent.environment import RANK_VARIABLES
from elaunch.rendezvous.types import Program, ProgramKind


def why_not(program: Program, loaded_at_start: Collection[str], looked_up: Collection[str], control_fd: int) -> str:
    """Why workers must not be forked from here, or the empty string.

    `loaded_at_start` are the modules of a bare interpreter, `looked_up` the variables that were read since.
    """
    if shadow := _shadow(program, loaded_at_start):
        return f"{shadow} has the name of a module that was preloaded"
    custom = [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    what = " or ".join([*custom, "a preloaded module"])
    if own := sorted(RANK_VARIABLES & set(looked_up)):
        return f"{what} looks up {own[0]}, which is another one in each worker"
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return f"{what} started a thread"
    # A worker's descriptors are its own from 4 on: what somebody holds open, a GPU or a file, would be taken from him.
    if held := next((path for fd, path in _open_files().items() if fd not in {0, 1, 2, control_fd}), None):
        return f"{what} keeps {held} open"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"{what} started CUDA"
    return ""


def _open_files() -> dict[int, str]:
    """This process's open descriptors and what they refer to."""
    files: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The one that listed them is gone by now.
        with suppress(OSError):
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def _shadow(program: Program, loaded_at_start: Collection[str]) -> Path | None:
    """A file that a fresh interpreter would import in place of what was preloaded, if any."""
    loaded = {name for name in sys.modules if "." not in name} - set(loaded_at_start) - set(sys.builtin_module_names)
    suffixes = ["/", *importlib.machinery.all_suffixes()]
    place = _programs_place(program)
    for entry in _entries(place) if place else ():
        # A folder that is no package is Python's last resort: a module elsewhere comes first.
        suffix = next((s for s in suffixes if entry.endswith(s)), None)
        if suffix and (name := entry.removesuffix(suffix)) in loaded:
            ours = getattr(sys.modules[name], "__file__", None)
            if ours is None or not Path(ours).is_relative_to(place):
                return Path(place, entry)
    return None


def _programs_place(program: Program) -> str:
    """What Python will put first on `sys.path` when it runs the program: a folder or a zip file, or nothing."""
    is_safe = getattr(sys.flags, "safe_path", False)
    if program.kind is ProgramKind.SCRIPT and not program.is_on_stdin:
        import zipfile

        if os.path.isdir(program.target) or zipfile.is_zipfile(program.target):  # noqa: PTH112
            return os.path.abspath(program.target)  # noqa: PTH100
        return "" if is_safe else os.path.dirname(os.path.realpath(program.target))  # noqa: PTH120
    return "" if is_safe else os.getcwd()  # noqa: PTH109


def _entries(place: str) -> Iterator[str]:
    """The names of modules' files in a folder or zip file; those of packages end in a slash."""
    import zipfile

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
