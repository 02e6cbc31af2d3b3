"""Lets a forked worker that has lost a peer end at once, with its memory left to the kernel.

The program ends as ever: Python prints its exception, joins its threads and calls its exit functions. Then it would
free each object by itself, and C++ its own. That takes a program with torch 0.3 s of CPU time, while the restart waits.

The exit code is decided then, and only Python knows it. So Python goes on with its end, but finds little to free:
`sys.modules` has only the program's own modules, and the others have a reference for ever. Then `exit` calls `_exit`
first, before the destructors of C++.
"""

from __future__ import annotations

import _io
import _socket
import atexit
import gc
import io
import os
import stat
import sys
import threading
import weakref
from contextlib import suppress
from itertools import compress
from types import FunctionType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any

from elaunch.agent.forkserver import exit_report
from elaunch.agent.forkserver.gloo_threads import GlooThreads
from elaunch.agent.forkserver.imported import is_installed
from elaunch.agent.peer_lost import is_peer_lost

if TYPE_CHECKING:
    from elaunch.agent.forkserver.preload import Preloaded

# A line that the agent sends before its SIGTERM; see `agent/workers/link.py`.
BROKEN = b'{"event": "group_broken"'
_LINK_BYTES = 1 << 16
# Longer than the rest of Python's end: no other thread is to run between two lines, and to import what was taken away.
_NO_SWITCH_S = 600.0
_PYTHONS_OWN = ("builtins", "sys")
# It leaves a generator behind where Python has printed the program's exception. Other generators of Python may do work
# at their end: `importlib.resources` removes a temporary file.
_TRACEBACK = os.path.join(os.path.dirname(os.__file__), "traceback.py")  # noqa: PTH118, PTH120
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
# Packages whose objects have finalizers that only free memory, or end processes and threads of this one.
_ONLY_FREE = ("torch", "multiprocessing", "subprocess", "concurrent", "asyncio", "weakref", "tqdm")
# Classes whose objects only close a file. Others of their packages, or made from them, may write.
_ONLY_CLOSE = {
    f"{package}.{name}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for name in (
        "profilers.base.PassThroughProfiler",
        "profilers.simple.SimpleProfiler",
        "profilers.advanced.AdvancedProfiler",
        "utilities.model_summary.model_summary.ModelSummary",
    )
}
# torch takes each of its operators out of a table, one after the other: 30 ms of CPU time.
_OPERATORS = ("torch.library", "_del_library")


class QuickEnd:
    """The last exit function of the interpreter: make it before any other one is registered.

    It does nothing in the process that made it. `arm` makes a forked worker use it.
    """

    def __init__(self) -> None:
        self._pid = -1
        self._link = -1
        self._gloo = GlooThreads()
        self._kept: list[object] = []
        self._libraries: dict[str, object] = {}
        self._ctypes: Any = None
        # Those that are there (a .pth file can register them) would run afterwards, and find no modules any more.
        self._is_last = atexit._ncallbacks() == 0
        atexit.register(self._end)

    def know_libraries(self) -> None:
        """In the fork server, which has no modules of the program: to look at each of them takes a worker 10 ms."""
        self._libraries = {name: module for name, module in sys.modules.items() if not _is_own(name, module)}

    def arm(self, link: int, preloaded: Preloaded, gloo: GlooThreads) -> None:
        """This process is a worker whose link is the socket with that inode."""
        self._pid, self._link, self._gloo = os.getpid(), link, gloo
        # Those that the program never imports are not in sys.modules.
        self._kept.append(preloaded)
        # The program may put anything in its place. It comes with torch; without torch there is not much to free.
        self._ctypes = sys.modules.get("ctypes") if self._is_last else None
        # These calls run before exit functions, of which weakref has one.
        register: Any = getattr(threading, "_register_atexit", None)
        if register and self._ctypes:
            register(self._keep_operators)

    def _keep_operators(self) -> None:
        """Have torch's table of operators left as it is, if this process ends quickly."""
        if os.getpid() != self._pid or "torch.library" not in sys.modules:
            return
        with suppress(Exception):
            if self._has_lost_peer():
                registry: Any = vars(weakref.finalize)["_registry"]
                for each in [*registry]:
                    function = registry[each].func
                    # What a program calls at its end need not be a function with a name.
                    names = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
                    if names == _OPERATORS:
                        each.atexit = False

    def _end(self) -> None:
        # A child that the program forked runs this too.
        if os.getpid() != self._pid or self._ctypes is None:
            return
        try:
            has_lost_peer = self._has_lost_peer()
            if has_lost_peer or exit_report.fatal() is not None:
                # Peers wait for this rank, or for one that waits for it. They need not wait until all is freed.
                self._gloo.half_close(self._ctypes)
            if has_lost_peer and not _has_hdf5():
                self._leave_memory()
        except Exception:
            # The program may have broken anything in this interpreter. Then Python frees what it can, as ever.
            return

    def _has_lost_peer(self) -> bool:
        error = exit_report.fatal()
        if error is not None:
            kind = type(error)
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            if is_peer_lost(name, str(error)):
                return True
        return self._was_told()

    def _was_told(self) -> bool:
        """Whether the agent has said that the group is broken. A program that reads its link has taken that away."""
        if os.fstat(exit_report.LINK_FD).st_ino != self._link:
            return False
        # Not `socket.socket`, in whose place gevent puts one that waits.
        link = _socket.socket(fileno=os.dup(exit_report.LINK_FD))
        try:
            return BROKEN in link.recv(_LINK_BYTES, _socket.MSG_PEEK | _socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        finally:
            link.close()

    def _leave_memory(self) -> None:
        libc, python = self._ctypes.CDLL(None), self._ctypes.pythonapi
        # Calls are made in the reverse order. glibc calls _exit with the exit code. What C has buffered is written as
        # `exit` does it: `fflush` would wait for ever for a file that another thread reads.
        if libc.on_exit(self._ctypes.cast(libc._exit, self._ctypes.c_void_p), None) == 0:
            libc["__cxa_atexit"](self._ctypes.cast(libc.fcloseall, self._ctypes.c_void_p), None, None)
        others = {name: each for name, each in sys.modules.items() if self._libraries.get(name) is not each}
        own = {name: module for name, module in others.items() if _is_own(name, module)}
        self._kept += [self._libraries, *(module for name, module in others.items() if name not in own)]
        programs = [m for name, m in own.items() if name not in _PYTHONS_OWN and isinstance(m, ModuleType)]
        is_quiet = _flush_files()
        sys.setswitchinterval(_NO_SWITCH_S)
        if is_quiet:
            gc.freeze()
            # Python empties a module to which something refers. Functions would keep the globals of one that is gone.
            self._kept += programs
        else:
            # A daemon thread that runs while a finalizer waits misses these globals. Python would not let it run.
            threading.excepthook = _say_nothing
            for module in programs:
                _end_globals(module)
        python.Py_IncRef(self._ctypes.py_object(self._kept))
        sys.modules.clear()
        sys.modules.update(own)


def _say_nothing(*_: object) -> None:
    pass


def _has_hdf5() -> bool:
    """Whether the process has loaded HDF5, which writes the files that are still open by a C exit function."""
    with open("/proc/self/maps", "rb") as maps:  # noqa: PTH123
        return b"/libhdf5" in maps.read()


def _flush_files() -> bool:
    """Write what open files still hold. Returns whether nothing is left that would write more at its own end.

    Such an object ends when nothing refers to it any more, and the garbage collector may have to find that out.
    """
    # In no closure: its cell would be one of these objects, and keep all of them.
    objects = gc.get_objects()
    # There may be half a million: each step over all of them takes 10 ms and more.
    classes = [*map(type, objects)]
    # By number, since a program's classes may be equal, or have no hash.
    numbers = [*map(id, classes)]
    kinds = dict(zip(numbers, classes, strict=True))
    # Each flush goes through all files below it.
    looked_at = {key for key, kind in kinds.items() if kind is GeneratorType or issubclass(kind, _BUFFERED)}
    is_alone, is_all = len(sys._current_frames()) == 1, True
    # By place: a look at each object again would take as long as the first one.
    for place in compress(range(len(objects)), map(looked_at.__contains__, numbers)):
        each = objects[place]
        if type(each) is GeneratorType:
            is_all = is_all and not _may_go_on(each)
            continue
        with suppress(Exception):
            if is_alone or not _may_block(each):
                # Closed, or no room: Python would not say so either.
                each.flush()
            else:
                is_all = False
    return is_all and not any(map(_writes_at_end, kinds.values()))


def _may_go_on(generator: GeneratorType[Any, Any, Any]) -> bool:
    """Whether the generator is of the program itself, or of Python for it, and may still run a `finally`."""
    file = generator.gi_code.co_filename
    # One that has ended has no frame.
    return file != _TRACEBACK and not is_installed("", file) and generator.gi_frame is not None


def _may_block(file: Any) -> bool:
    """Whether a daemon thread may hold the file for ever, while it writes: a pipe that nobody reads."""
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:
        return False


def _writes_at_end(kind: type) -> bool:
    """Whether objects of that class may write at their end: files of a kind of their own, and what has a finalizer."""
    # `issubclass` would ask each class of files there is whether it knows this one: 0.1 ms for a class.
    if _io._IOBase in kind.__mro__:
        return kind.__module__ != "_io"
    for each in kind.__mro__:
        if isinstance(vars(each).get("__del__"), FunctionType):
            if f"{kind.__module__}.{kind.__qualname__}" in _ONLY_CLOSE:
                return False
            return each.__module__.partition(".")[0] not in _ONLY_FREE
    return False


def _end_globals(module: ModuleType) -> None:
    """Let go of those globals that may write at their end: a library's reference to a function would keep them."""
    names = vars(module)
    for name in [name for name, value in names.items() if _has_writer(value)]:
        del names[name]


def _has_writer(value: object) -> bool:
    """Whether the object may write at its end, or one that it holds: a temporary file is two objects."""
    if isinstance(value, (FunctionType, ModuleType, type)):
        return False
    held = [value, *gc.get_referents(value)]
    # An object's attributes may be in a dictionary of theirs.
    held += [each for some in held[1:] if type(some) is dict for each in some.values()]
    return any(map(_writes_at_end, {type(each) for each in held}))


def _is_own(name: str, module: object) -> bool:
    """Whether a module is of the program itself, and ends as ever."""
    if name == "__main__" or name in _PYTHONS_OWN:
        return True
    origin = getattr(vars(module).get("__spec__"), "origin", None) if isinstance(module, ModuleType) else None
    return isinstance(origin, str) and not is_installed(name, origin) and name.partition(".")[0] != "elaunch"
