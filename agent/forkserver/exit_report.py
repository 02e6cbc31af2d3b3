"""A worker's report to its agent that its program has ended, and whether by an exception.

After Python prints the exception, it still joins threads, runs atexit calls and destroys objects. It can hang there.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from _frozen_importlib_external import PathFinder

from elaunch.agent.forkserver.crash_stack import EXIT_CODE
from elaunch.agent.forkserver.finders import ImportLock, LeavingFinder

# `typing` itself is not imported: a fresh worker imports this before its program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

LINK_FD = 3
# glibc's _IONBF.
_UNBUFFERED = 2
_NAMES_MAX, _NAME_MAX = 16, 100
_FOLDER = os.path.dirname(os.__file__)  # noqa: PTH120
_STANDARD = (_FOLDER, os.path.join(_FOLDER, "lib-dynload"))  # noqa: PTH118


def promise(crash_fd: int) -> int:
    """Send the report when the program has ended, before Python joins its threads. Returns the link, for `tell`.

    The exit code goes to `crash_fd` (-1: nowhere), the file for crashes.
    """
    pid = os.getpid()
    # The program may reuse the fds for other files. The inodes identify these.
    link, crash = os.fstat(LINK_FD).st_ino, os.fstat(crash_fd).st_ino if crash_fd >= 0 else -1

    def say() -> None:
        # A child that the program forked runs this too, but its end is not the worker's.
        if os.getpid() == pid:
            try:
                _report(link)
                if crash >= 0 and os.fstat(crash_fd).st_ino == crash:
                    _keep_exit_code(crash_fd)
            except Exception:
                # The program may have broken anything in this interpreter. Its end is still its own.
                return

    # These calls run before Python joins its threads, atexit's only afterwards. concurrent.futures uses them too.
    register: Any = getattr(threading, "_register_atexit", None)
    if register is None:
        import atexit

        register = atexit.register
    register(say)
    return link


def load() -> None:
    """Import in the fork server what its workers need before their programs and for their reports."""
    import json  # noqa: F401
    import traceback  # noqa: F401

    from elaunch.agent.forkserver import collectives, crash_stack  # noqa: F401

    crash_stack.faulthandler()


def tell(link: int, said: dict[str, Any]) -> None:
    """Send a message on the link, the socket with that inode, if fd 3 is still that socket.

    The agent reads the link from time to time.
    """
    import json

    _send(link, json.dumps(said))


def _report(link: int) -> None:
    with _StandardFinder():
        error = fatal()
        # An import may run code by eval, after which Python has forgotten that it is to die of SIGINT (exit_sigint).
        if error is not None and ("traceback" in sys.modules or not isinstance(error, KeyboardInterrupt)):
            _record(error)
        raised, reached = ("true" if is_so else "false" for is_so in (error is not None, _reached_store()))
        threads = _threads()
        rest = f'"monotonic_s": {time.monotonic()!r}{threads}'
        said = f'{{"event": "ended", "raised": {raised}, "reached_store": {reached}, {rest}}}'
        _send(link, said, last=True)


def _keep_exit_code(crash_fd: int) -> None:
    """Have C write the exit code there, as a byte, when Python is done: a library's destructor may crash after that.

    With torch, ctypes is there; a program without it has few libraries.
    """
    if ctypes := sys.modules.get("ctypes"):
        libc: Any = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(libc.fdopen(os.dup(crash_fd), b"a"))
        libc.setvbuf(stream, None, _UNBUFFERED, ctypes.c_size_t(0))
        if libc.on_exit(libc.fputc, stream) == 0:
            os.write(crash_fd, EXIT_CODE)


def _threads() -> str:
    """The threads that Python will wait for, as a further field of the report; mostly there are none."""
    try:
        found = [each.name for each in threading.enumerate() if not each.daemon]
        main = threading.main_thread().name
        names = [name[:_NAME_MAX] for name in found if name != main][:_NAMES_MAX]
    except Exception:
        # gevent and others put classes of their own there.
        return ""
    if not names:
        return ""
    import json

    return f', "threads": {json.dumps(names)}'


class _StandardFinder(LeavingFinder):
    """Finds the standard library's modules for this thread: a file beside the script may have the name of one.

    The program's other threads may still run, and import what is beside the script.
    """

    def __init__(self) -> None:
        self._thread = _thread.get_ident()

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        self._thread = -1
        with ImportLock():
            self._leave()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self._thread == _thread.get_ident():
            return PathFinder.find_spec(name, _STANDARD if path is None else path, target)
        return self._find_behind(name, path, target) if self._thread == -1 and self._leave() else None


def _send(link: int, line: str, *, last: bool = False) -> None:
    """Send the line. The `last` one wakes the agent."""
    import _socket

    try:
        if os.fstat(LINK_FD).st_ino != link:
            return
        end = _socket.socket(fileno=os.dup(LINK_FD))
    except OSError:
        return
    try:
        # The program must not wait for an agent that does not read.
        end.send(f"\n{line}\n".encode(), _socket.MSG_DONTWAIT)
    except OSError:
        pass
    finally:
        if last:
            end.shutdown(_socket.SHUT_WR)
        end.close()


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
    said = {
        "message": f"{type(error).__name__}: {_message(error)}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    try:
        with open(path, "x") as file:  # noqa: PTH123
            json.dump({"message": said}, file)
    except OSError:
        return


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _reached_store() -> bool:
    """Whether this process ever made its default process group, for which it must have reached the worker store."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and (c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None)
