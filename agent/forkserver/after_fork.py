"""Renews the state that a forked process has from its parent and that a fresh process would not have."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from elaunch.agent.forkserver.preload import Preloaded


def refresh(preloaded: Preloaded) -> None:
    """Renew `__main__`, random seeds and keys, and forget values that come from the old environment."""
    _main_module()
    if threading := sys.modules.get("threading"):
        # Python does not renew the main thread's native id after a fork (CPython, threading._after_fork).
        set_native_id = getattr(threading.main_thread(), "_set_native_id", None)
        if set_native_id:
            set_native_id()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile:
        # TMPDIR may have changed by the time that the program asks.
        tempfile.tempdir = None
    if random := preloaded.module("numpy.random"):
        random.seed()
    if torch := preloaded.module("torch"):
        # Only the CPU's generator: CUDA's generators are made when CUDA starts, each with a seed of its own.
        torch.default_generator.seed()


def know_threads(preloaded: Preloaded) -> None:
    """Find out in the fork server what costs a worker 1 ms each: OpenBLAS's libraries, and torch's number of threads.

    Each worker compares the number with its own CPUs and variables (`set_threads`). Without OMP_NUM_THREADS it would be
    the number of this process's CPUs, so a worker counts for itself then.
    """
    if preloaded.module("numpy"):
        _openblas()
    if (torch := preloaded.module("torch")) and _number("OMP_NUM_THREADS"):
        torch.get_num_threads()


def set_threads(changed: Collection[str], modules: Mapping[str, Any]) -> None:
    """Give torch and numpy's BLAS, if they are in `modules`, the thread counts that a fresh import would give them.

    Both were loaded in a process that may use all CPUs, and BLAS with one thread. This process may have fewer CPUs.
    Both read the variables only when they are loaded. `changed` are the variables with another value since then.
    """
    cpus = len(os.sched_getaffinity(0))
    openmp = _number("OMP_NUM_THREADS") or cpus
    if "torch" in modules:
        torch = modules["torch"]
        now = wanted = torch.get_num_threads()
        if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}.isdisjoint(changed):
            wanted = (_number("MKL_NUM_THREADS") or openmp) if torch.backends.mkl.is_available() else openmp
        wanted = min(wanted, cpus)
        if wanted != now:
            torch.set_num_threads(wanted)
    if "numpy" in modules:
        for set_number in _openblas():
            set_number(_number("OPENBLAS_NUM_THREADS") or openmp)


def _number(variable: str) -> int:
    """The positive number in `variable`, else 0. OMP_NUM_THREADS may be a list, with one for each level of nesting."""
    text = os.environ.get(variable, "").partition(",")[0].strip()
    return int(text) if text.isdecimal() else 0


@cache
def _openblas() -> list[Any]:
    """The function of each OpenBLAS in this process that sets the number of its threads."""
    import ctypes

    with open("/proc/self/maps", errors="surrogateescape") as maps:  # noqa: PTH123
        paths = {line.rstrip("\n").split(maxsplit=5)[5] for line in maps if "openblas" in line}
    found = []
    for library in paths:
        try:
            loaded = ctypes.CDLL(library)
        except OSError:
            # The file was replaced after it was loaded, or is not a library.
            continue
        names = (f"{a}openblas_set_num_threads{b}" for a in ("scipy_", "") for b in ("64_", ""))
        found += [getattr(loaded, name) for name in names if hasattr(loaded, name)][:1]
    return found


def _main_module() -> None:
    """Make a `__main__` like the one that Python made at its start, but known to the garbage collector.

    The one from before the fork is frozen (`gc.freeze`). Objects that a program leaves in it would never be finalised,
    and the data of open files would not be written.
    """
    main = ModuleType("__main__")
    vars(main).update(vars(sys.modules["__main__"]))
    if "__annotations__" in vars(main):
        main.__annotations__ = {}
    sys.modules["__main__"] = main


def standard_streams() -> None:
    """New sys.stdin, stdout and stderr on fds 0 to 2, as `python -u` makes them (CPython, create_stdio)."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        if old is None:
            continue
        binary: Any = open(fd, "rb" if fd == 0 else "wb", -1 if fd == 0 else 0, closefd=False)  # noqa: SIM115
        text = io.TextIOWrapper(binary, old.encoding, old.errors, newline="\n", write_through=True)
        (binary.raw if fd == 0 else binary).name = f"<{name}>"
        text.mode = "r" if fd == 0 else "w"  # type: ignore[misc]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
