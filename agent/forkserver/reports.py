"""What a worker's interpreter reports to its agent: that its program has ended, how, and the stack of a crash.

After Python prints an exception, it still joins threads, runs atexit calls and destroys objects. It can hang there.
A fresh worker imports this before its program, so it imports as little as it can.
"""

from __future__ import annotations

import faulthandler
import os
import site
import sys
import time

# `typing` itself is not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

LINK_FD = 3
# The marker in the crash file before the byte that is the program's exit code.
EXIT_CODE = b"\nexit code: "
# glibc's _IONBF.
_UNBUFFERED = 2
_VARIABLE = "ELAUNCH_BOOT"
# The modules of the standard library that these reports need, and that a bare Python has not loaded. A program that is
# a fresh interpreter and has a module of the same name beside it must get its own: it reports no exit.
NEEDED = (
    *("collections", "contextlib", "copyreg", "enum", "faulthandler", "functools", "json", "keyword", "linecache"),
    *("operator", "re", "reprlib", "textwrap", "threading", "token", "tokenize", "traceback", "types", "_weakrefset"),
)


def prepare_fresh(loaded_at_start: Collection[str], prepare_collectives: Callable[[None], None]) -> None:
    """In a worker that is a fresh interpreter: undo the hook, start its reports, and run the user's sitecustomize.

    The program then finds what it would find without elaunch, but for a few modules of the standard library that are
    imported already, and for what docs/fidelity.md lists. `prepare_collectives` is `collectives.prepare`.
    """
    _, crash_fd, pythonpath, reports_exit = os.environ.pop(_VARIABLE).split()
    hook_dir = sys.path[0]
    rest = os.environ["PYTHONPATH"].removeprefix(hook_dir).removeprefix(os.pathsep)
    leave_hook(hook_dir, None if pythonpath == "unset" else rest)
    try:
        report_crash(int(crash_fd))
        if reports_exit == "1":
            report_exit(int(crash_fd))
        prepare_collectives(None)
    except Exception:
        # The program runs all the same; only the report of its exit is incomplete.
        pass
    for name in [name for name in sys.modules if name not in loaded_at_start and name.startswith("elaunch")]:
        del sys.modules[name]
    python: Any = site
    python.execsitecustomize()


def leave_hook(hook_dir: str, pythonpath: str | None) -> None:
    """Undo what made Python import elaunch's sitecustomize. `pythonpath` is the user's, None if it was not set."""
    sys.path.remove(hook_dir)
    sys.path_importer_cache.pop(hook_dir, None)
    del sys.modules["sitecustomize"]
    if pythonpath is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = pythonpath


def report_crash(fd: int) -> None:
    """Write the stack to `fd` at SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT; the signal then has its effect.

    If the user has enabled faulthandler (PYTHONFAULTHANDLER, -X), it continues to write to stderr. With a negative
    `fd` it does nothing.
    """
    if fd < 0:
        return
    os.set_inheritable(fd, False)
    if not faulthandler.is_enabled():
        faulthandler.enable(fd)


def report_exit(crash_fd: int) -> int:
    """Send a report when the program has ended, before Python joins its threads. Returns the link, for `send`.

    The exit code goes to `crash_fd` (-1: nowhere), the crash file.
    """
    pid = os.getpid()
    # The program may reuse the numbers for other files.
    link, crash = os.fstat(LINK_FD).st_ino, os.fstat(crash_fd).st_ino if crash_fd >= 0 else -1

    def report() -> None:
        # A child that the program forked runs this too, but its exit is not the worker's.
        if os.getpid() == pid:
            try:
                _report(link)
                if crash >= 0 and os.fstat(crash_fd).st_ino == crash:
                    _record_exit_code(crash_fd)
            except Exception:
                # The program may have broken anything in this interpreter. It still exits as it would.
                return

    at_program_end(report)
    return link


def at_program_end(call: Callable[[], None]) -> None:
    """Call it when the program has ended, before the calls that were registered earlier."""
    # Imported here: a fresh worker with a module of a name in NEEDED beside its program does not call this.
    import threading

    # These calls run before Python joins its threads, atexit's only afterwards. concurrent.futures uses them too.
    register: Any = getattr(threading, "_register_atexit", None)
    if register is None:
        import atexit

        register = atexit.register
    register(call)


def _report(link: int) -> None:
    error = fatal()
    # An import may run code by eval, which clears Python's flag to exit by SIGINT (exit_sigint).
    if error is not None and ("traceback" in sys.modules or not isinstance(error, KeyboardInterrupt)):
        _record(error)
    message = {"event": "ended", "raised": error is not None, "reached_store": _reached_store()}
    send(link, {**message, "monotonic_s": time.monotonic()}, is_last=True)


def _record_exit_code(crash_fd: int) -> None:
    """Make C write the exit code there, as a byte, when Python is done: a library's destructor may abort after that.

    torch imports ctypes; a program without ctypes has few libraries.
    """
    if ctypes := sys.modules.get("ctypes"):
        libc: Any = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(libc.fdopen(os.dup(crash_fd), b"a"))
        libc.setvbuf(stream, None, _UNBUFFERED, ctypes.c_size_t(0))
        if libc.on_exit(libc.fputc, stream) == 0:
            os.write(crash_fd, EXIT_CODE)


def is_link(link: int) -> bool:
    """Whether fd 3 is still the socket with that inode: the program may reuse the number."""
    try:
        return os.fstat(LINK_FD).st_ino == link
    except OSError:
        return False


def send(link: int, message: dict[str, Any], rights: Any = (), *, is_last: bool = False) -> None:
    """Send a message on the link, the socket with that inode, if fd 3 is still that socket.

    The agent reads the link from time to time; the last message wakes it. `rights` is ancillary data.
    """
    import json
    from _socket import MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, socket

    if not is_link(link):
        return
    line = f"\n{json.dumps(message)}\n".encode()
    # Not a duplicate: the program may have no descriptor left.
    own = socket(fileno=LINK_FD)
    try:
        # The program must not wait for an agent that does not read.
        own.sendmsg([line], rights, MSG_DONTWAIT | MSG_NOSIGNAL)
    except OSError:
        pass
    finally:
        if is_last:
            own.shutdown(SHUT_WR)
        own.detach()


def fatal() -> BaseException | None:
    """The exception that ended the program, if one did.

    Python leaves it in `sys.last_value`. Consoles, debuggers and pytest also leave exceptions there that they have
    handled. The outermost frame of an exception that ended the program is in `__main__`, or in runpy above it.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None or error.__traceback__ is None:
        return None
    outermost = error.__traceback__.tb_frame
    file = outermost.f_code.co_filename
    # Code that was typed into a console also runs in `__main__`, but has no file.
    is_main = outermost.f_globals is vars(sys.modules["__main__"]) and (file == "<stdin>" or file[:1] != "<")
    return error if is_main or file == "<frozen runpy>" or file.endswith(f"{os.sep}runpy.py") else None


def _record(error: BaseException) -> None:
    """Write the exception to TORCHELASTIC_ERROR_FILE in the form of torch's `@record`, if `@record` has not done so."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import json
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = {
        "message": f"{type(error).__name__}: {message_of(error)}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    try:
        with open(path, "x") as file:  # noqa: PTH123
            json.dump({"message": message}, file)
    except OSError:
        return


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _reached_store() -> bool:
    """Whether this process ever made its default process group, for which it must have reached the worker store."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and (c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None)
