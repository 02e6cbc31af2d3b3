"""Renews what a worker has inherited from the fork server: right after the fork, and when the program imports modules.

Preloaded modules are hidden until the program imports one of them. Variables that torch and OpenMP read when they are
loaded were read in the fork server: a fixed table applies what the program has set since then. At their import,
Lightning and torchmetrics store the rank, and Lightning adds a log handler.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from elaunch.agent.forkserver import reports
from elaunch.agent.forkserver.preload import Preloaded, libraries, restore_environment

_THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
# C++ code reads these when torch or numpy is loaded, unseen by Python.
_IN_CPP = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES")
# Of the allocator's settings only the backend is read when torch is loaded (CUDACachingAllocator.cpp).
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
# These are read while modules are imported, and again whenever they are needed.
_READ_AGAIN = {
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES"),
    *("TMPDIR", "TEMP", "TMP", "LOGNAME", "USER", "LNAME", "USERNAME"),
}
# Scripts import it first, and set variables for torch afterwards. So it is put back alone.
_ALONE = "numpy"
_OTHERS = "others"


def refresh(preloaded: Preloaded) -> None:
    """Renew `__main__`, random seeds and keys, and forget values that come from the old environment."""
    _renew_main()
    if threading := sys.modules.get("threading"):
        # Python does not renew the main thread's native id after a fork (CPython, threading._after_fork).
        set_native_id = getattr(threading.main_thread(), "_set_native_id", None)
        if set_native_id:
            set_native_id()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile:
        # TMPDIR may have changed by the time that the program needs it.
        tempfile.tempdir = None
    if random := preloaded.module("numpy.random"):
        random.seed()
    if torch := preloaded.module("torch"):
        # Only the CPU's generator: CUDA's generators are made when CUDA starts, each with a seed of its own.
        torch.default_generator.seed()


def _renew_main() -> None:
    """Make a `__main__` like the one that Python made at its start, but known to the garbage collector.

    The one from before the fork is frozen (`gc.freeze`). Objects that a program leaves in it would never be finalised,
    and the data of open files would not be written.
    """
    main = ModuleType("__main__")
    vars(main).update(vars(sys.modules["__main__"]))
    if "__annotations__" in vars(main):
        main.__annotations__ = {}
    sys.modules["__main__"] = main


def renew_streams() -> None:
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


class HiddenModules:
    """A finder that gives the program the preloaded modules: the first import of one puts all of its group back.

    It is made once, before any fork. It stays a finder until there is one thread, so that no importing thread re-runs
    a module that another one has put back. Its base class is not importlib.abc's, which would import 30 modules.
    """

    def __init__(self, preloaded: Preloaded) -> None:
        self._preloaded = preloaded
        self._modules = preloaded.hidden
        # Modules that are still hidden, by group. A group is taken by one `pop`, so by one thread.
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        for name, module in self._modules.items():
            self._hidden.setdefault(_group(name), {})[name] = module
        self._groups = set(self._hidden)
        self._back: set[str] = set()
        self._specs: dict[str, ModuleSpec | None] = {}
        self._environment: dict[str, str] = {}
        self._link = 0
        self._late: set[str] = set()
        if not self._modules:
            return
        forget_ranks(self._modules)
        for name in self._modules:
            del sys.modules[name]
        _set_filters([each for each in warnings.filters if each not in preloaded.filters])
        sys.meta_path.insert(0, self)

    def begin(self, link: int) -> None:
        """Start in a worker that has this link. Only later changes of its environment are applied."""
        self._environment = dict(os.environ)
        self._link = link

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._modules.get(name)
        # A module that was put back is found for a thread that has missed it. If the program has removed it, or loads
        # it again (`target`), it is loaded from its file.
        is_gone = _group(name) in self._back and sys.modules.get(name) is not module
        if module is None or module.__spec__ is None or target is not None or is_gone:
            self._leave_if_done()
            return None
        known = self._specs.setdefault(name, module.__spec__)
        assert known
        loader: Any = _Handover(self, module, known)
        spec = ModuleSpec(name, loader, origin=known.origin)
        spec.submodule_search_locations = known.submodule_search_locations
        spec.has_location = known.has_location
        # Python loads by the module's own spec if another thread puts the module back while this one is here.
        module.__spec__ = spec
        return spec

    def open(self, name: str) -> None:
        """Put modules back, and do what their imports do in this process."""
        back: dict[str, ModuleType] = {}
        groups = (_ALONE,) if _group(name) == _ALONE else tuple(self._groups)
        for group in groups:
            back |= self._hidden.pop(group, {})
        if not back:
            return
        # An entry that the program has made itself stays: a stand-in, or None, which forbids the import.
        own = {known: sys.modules[known] for known in back.keys() & sys.modules.keys()}
        # In one step: all workers of a restart do this at the same time.
        sys.modules.update(back)
        sys.modules.update(own)
        if not self._back:
            self._register()
        self._back.update(groups)
        changed = {n for n in {*self._environment, *os.environ} if self._environment.get(n) != os.environ.get(n)}
        if _OTHERS in groups:
            restore_environment({n: value for n, value in self._preloaded.sets.items() if n not in changed})
        find_ranks(back)
        late = apply(changed, back, self._preloaded.looked_up) - self._late
        if late:
            self._late |= late
            which = " and ".join(sorted(late))
            text = f"{which}: set by the program when {name} had been imported already, without effect there"
            message = {"event": "note", "text": f"{text}; set it in the shell, or use --no-preload"}
            reports.send(self._link, message)
        self._leave_if_done()

    def _register(self) -> None:
        """Make the warning filters and exit functions of the imports this process's own."""
        filters = self._preloaded.filters
        if filters:
            _set_filters([*filters, *(each for each in warnings.filters if each not in filters)])
        for call, args, kwargs in self._preloaded.at_exit:
            atexit.register(call, *args, **kwargs)

    def _leave_if_done(self) -> None:
        if self._back == self._groups and self in sys.meta_path and len(sys._current_frames()) == 1:
            for name, spec in self._specs.items():
                self._modules[name].__spec__ = spec
            # A new list: a thread that iterates over the old one misses no finder.
            sys.meta_path = [each for each in sys.meta_path if each is not self]


class _Handover:
    """Loads a module by returning the one that was preloaded."""

    def __init__(self, hidden: HiddenModules, module: ModuleType, spec: ModuleSpec) -> None:
        self._hidden = hidden
        self._module = module
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._hidden.open(module.__name__)
        finally:
            # Not earlier: while the module has the import's own spec, other threads wait for the end of the import.
            module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader, name)


def _group(name: str) -> str:
    return _ALONE if name.partition(".")[0] == _ALONE else _OTHERS


def _set_filters(filters: list[Any]) -> None:
    # After resetwarnings(), modules that have warned before check the filters again.
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


def apply(changed: Collection[str], modules: Mapping[str, Any], looked_up: Collection[str]) -> set[str]:
    """Apply variables to `modules`, which the program imports now. Returns those that were set too late.

    The values of `changed` differ from those at the modules' imports; `looked_up` are those that Python code read then.
    """
    _set_threads(changed, modules)
    torch = modules.get("torch")
    read_again = {name for name in changed if torch and _reads_again(torch, name)}
    read = {name for name in changed if name in looked_up or name.startswith(_IN_CPP) or name in _ALLOCATOR}
    return read - read_again - _THREADS - _READ_AGAIN


def _reads_again(torch: Any, name: str) -> bool:
    """Make torch read the variable again. Returns whether it has."""
    if name in _ALLOCATOR:
        return torch.version.cuda is None or "backend" not in os.environ.get(name, "")
    read = next((read for prefix, read in _READ_BY_TORCH.items() if name.startswith(prefix)), None)
    if read is None:
        return False
    try:
        read(torch)
    except Exception:
        # Another version of torch may have other internals.
        return False
    return True


def _set_log_levels(torch: Any) -> None:
    internal = torch._logging._internal
    internal.log_state.clear()
    internal._init_logs()


def _set_cpp_log_level(torch: Any) -> None:
    # c10::initLogging()
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()


_READ_BY_TORCH: Mapping[str, Callable[[Any], None]] = {
    "TORCH_DISTRIBUTED_DEBUG": lambda torch: torch.distributed.set_debug_level_from_env(),
    "TORCH_CPP_LOG_LEVEL": _set_cpp_log_level,
    "TORCH_LOGS": _set_log_levels,
}


def _set_threads(changed: Collection[str], modules: Mapping[str, Any]) -> None:
    """Give torch and numpy's BLAS, if they are in `modules`, the thread counts that a fresh import would give them.

    Both were loaded in a process that may use all CPUs, and BLAS with one thread. This process may have fewer CPUs.
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
        for set_number in openblas():
            set_number(_number("OPENBLAS_NUM_THREADS") or openmp)


def _number(variable: str) -> int:
    """The positive number in `variable`, else 0. OMP_NUM_THREADS may be a list, one number per nesting level."""
    text = os.environ.get(variable, "").partition(",")[0].strip()
    return int(text) if text.isdecimal() else 0


@cache
def openblas() -> list[Any]:
    """The functions that set the thread count of each OpenBLAS in this process. Workers inherit the list."""
    found = []
    for library in [path for path in libraries() if "openblas" in path]:
        try:
            loaded = ctypes.CDLL(library)
        except OSError:
            # The file was replaced after it was loaded, or is not a library.
            continue
        names = (f"{a}openblas_set_num_threads{b}" for a in ("scipy_", "") for b in ("64_", ""))
        found += [getattr(loaded, name) for name in names if hasattr(loaded, name)][:1]
    return found


_RANKS: Mapping[str, Callable[[Any], int]] = {
    "lightning.fabric.utilities.rank_zero": lambda module: module._get_rank() or 0,
    "lightning_fabric.utilities.rank_zero": lambda module: module._get_rank() or 0,
    "torchmetrics.utilities.prints": lambda _: int(os.environ.get("LOCAL_RANK", 0)),
}
_LOGGERS = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")


def forget_ranks(modules: Mapping[str, ModuleType]) -> None:
    """In the fork server: delete the rank that these modules stored, as before their import."""
    for name in _RANKS.keys() & modules.keys():
        # A version that keeps the rank elsewhere has no such attribute.
        with suppress(AttributeError):
            del vars(modules[name])["rank_zero_only"].rank


def find_ranks(modules: Mapping[str, ModuleType]) -> None:
    """In a worker that imports these modules: store the rank, and set up logging, as their import would."""
    for name in [name for name in _RANKS if name in modules]:
        function = vars(modules[name]).get("rank_zero_only")
        if function is not None and not hasattr(function, "rank"):
            function.rank = _RANKS[name](modules[name])
    if logging.getLogger().hasHandlers():
        # The program has set up logging before: they have no handler of their own then.
        for logger in [logging.getLogger(name) for name in _LOGGERS if name in modules]:
            for handler in [each for each in logger.handlers if type(each) is logging.StreamHandler]:
                logger.removeHandler(handler)
                logger.propagate = True
