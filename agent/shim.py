"""Runs a program in a forked interpreter as `python -u script.py` or `python -u -m module` would have run it.

What Python does at its start and end for `__main__` is done again here; CPython's Modules/main.c and Python/pythonrun.c
are the reference. A traceback shows no frame of ours.
"""

from __future__ import annotations

import io
import json
import marshal
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER
from types import ModuleType, TracebackType
from typing import Any

from elaunch.rendezvous.types import Program, ProgramKind

LINK_FD = 3

_keep: list[object] = []
_link_inode = 0


def fresh(argv: tuple[str, ...]) -> None:
    """Undo what a fork shares and a fresh process does not: random seeds, keys, thread counts, stdio's state."""
    global _link_inode
    sys.orig_argv = list(argv)
    # The number may be given to another file later; a socket's inode is its own.
    _link_inode = os.fstat(LINK_FD).st_ino
    _standard_streams()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if random := sys.modules.get("numpy.random"):
        random.seed()
    if torch := sys.modules.get("torch"):
        # The CPU's generator only: CUDA's are made when CUDA starts, with a seed of their own.
        torch.default_generator.seed()
        # Imported with all CPUs in sight; this worker may have been bound to some of them.
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
    _blas_threads()


def run(program: Program, mask: Collection[int]) -> None:
    """Run the program as `__main__`; raises what it raises, printed already, so that Python ends with its status.

    `mask` are the signals that stay blocked; one that has waited is the program's from its first line on.
    """
    pid = os.getpid()
    main = ModuleType("__main__")
    _keep.append(sys.modules["__main__"])
    if "__annotations__" in vars(sys.modules["__main__"]):
        # Python's start makes it, runpy does not.
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if program.kind is ProgramKind.MODULE:
            _run_module(program)
        else:
            _run_script(program, main)
    except SystemExit as error:
        if os.getpid() == pid and error.code:
            if isinstance(error.code, str) and _innermost_file(error) == "<frozen runpy>":
                # runpy's way to say that the module is not there.
                _record("ModuleNotFoundError", error.code.partition(": ")[2], error.code)
            _tell_agent(raised=False)
        raise
    except BaseException as error:
        # Python's own hook prints the exception's traceback, not the one that it is given.
        error.__traceback__ = _without_our_frames(error.__traceback__)
        # A child that the program forked unwinds through here too; its death is its own.
        if os.getpid() == pid:
            _record(type(error).__name__, _said(error), "".join(traceback.format_exception(error)))
            _tell_agent(raised=True)
        sys.excepthook(type(error), error, error.__traceback__)
        # It is printed; Python still has to take its own way out (exit code, SIGINT's, atexit, threads).
        sys.excepthook = lambda *_: None
        raise


def _run_script(program: Program, main: ModuleType) -> None:
    path = program.target
    sys.argv = [path, *program.args]
    absolute = path if os.path.isabs(path) else f"{os.getcwd()}/{path}"  # noqa: PTH109, PTH117
    if os.path.isdir(path) or _is_zip(path):  # noqa: PTH112
        import runpy

        sys.path.insert(0, absolute)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr
        )
        sys.exit(2)
    main.__dict__.update(
        __builtins__=sys.modules["builtins"],
        __file__=absolute,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", absolute),
    )
    if source[:4] == MAGIC_NUMBER:
        code = marshal.loads(source[16:])
        main.__dict__["__loader__"] = SourcelessFileLoader("__main__", absolute)
    else:
        code = compile(source, absolute, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(program: Program) -> None:
    import runpy

    sys.argv = ["-m", *program.args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    # What `python -m` itself calls.
    runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]


def _is_zip(path: str) -> bool:
    with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
        if file.read(4) == b"PK\x03\x04":
            return True
    return False


def _without_our_frames(tail: TracebackType | None) -> TracebackType | None:
    while tail and tail.tb_frame.f_code.co_filename == __file__:
        tail = tail.tb_next
    return tail


def _innermost_file(error: BaseException) -> str:
    tail = error.__traceback__
    while tail and tail.tb_next:
        tail = tail.tb_next
    return tail.tb_frame.f_code.co_filename if tail else ""


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _record(exception: str, message: str, text: str) -> None:
    """Leave the exception in TORCHELASTIC_ERROR_FILE in the form of torch's `@record`, whose own record wins."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    said = {
        "message": f"{exception}: {message}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    with suppress(OSError), open(path, "x") as file:  # noqa: PTH123
        json.dump({"message": said}, file)


def _tell_agent(raised: bool) -> None:
    """Say on the link that the program is over, badly: Python's way out from here can hang, and the others wait."""
    said = {"event": "ended", "raised": raised, "reached_store": reached_store()}
    with suppress(OSError):
        if os.fstat(LINK_FD).st_ino == _link_inode:
            with socket.socket(fileno=os.dup(LINK_FD)) as link:
                # A full link is the agent's trouble; the program's end does not wait for it.
                link.send(b"\n" + json.dumps(said).encode() + b"\n", socket.MSG_DONTWAIT)


def reached_store() -> bool:
    """Whether this process ever made its default process group, which starts with a visit to the worker store."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and (c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None)


def _standard_streams() -> None:
    """New sys.stdin, stdout and stderr on fds 0 to 2, as `python -u` makes them (CPython, create_stdio)."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        if old is None:
            continue
        binary: Any = open(fd, "rb" if fd == 0 else "wb", -1 if fd == 0 else 0, closefd=False)  # noqa: SIM115
        text = io.TextIOWrapper(binary, old.encoding, old.errors, newline=None if fd == 0 else "\n", write_through=True)
        (binary.raw if fd == 0 else binary).name = f"<{name}>"
        text.mode = "r" if fd == 0 else "w"  # type: ignore[misc]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _blas_threads() -> None:
    """Give numpy's OpenBLAS the threads that it would have had; it reads the variable only once, at import."""
    if "numpy" not in sys.modules:
        return
    import ctypes

    wanted = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0))
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    for library in libraries:
        loaded = ctypes.CDLL(library)
        names = (f"{a}openblas_set_num_threads{b}" for a in ("scipy_", "") for b in ("64_", ""))
        if name := next((n for n in names if hasattr(loaded, n)), None):
            getattr(loaded, name)(threads)
