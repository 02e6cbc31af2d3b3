"""A worker's report to its agent that its program has ended, and whether by an exception.

After Python prints the exception, it still joins threads, runs atexit calls and destroys objects. It can hang there.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

LINK_FD = 3


def promise() -> int:
    """Send the report when the program has ended, before Python joins its threads. Returns the link, for `tell`."""
    pid = os.getpid()
    # The program may reuse the fd for another file. The inode identifies the socket.
    link = os.fstat(LINK_FD).st_ino

    def say() -> None:
        # A child that the program forked runs this too, but its end is not the worker's.
        if os.getpid() != pid:
            return
        error = _fatal()
        if error is not None:
            _record(error)
        tell(link, {"event": "ended", "raised": error is not None, "reached_store": _reached_store()}, last=True)

    # These calls run before Python joins its threads, atexit's only afterwards. concurrent.futures uses them too.
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    register(say)
    return link


def tell(link: int, said: dict[str, Any], last: bool = False) -> None:
    """Send a message on the link, the socket with that inode, if fd 3 is still that socket.

    The agent reads the link from time to time. The `last` message wakes it.
    """
    with suppress(OSError):
        if os.fstat(LINK_FD).st_ino == link:
            with socket.socket(fileno=os.dup(LINK_FD)) as end:
                # The program must not wait for an agent that does not read.
                with suppress(BlockingIOError):
                    end.send(b"\n" + json.dumps(said).encode() + b"\n", socket.MSG_DONTWAIT)
                if last:
                    end.shutdown(socket.SHUT_WR)


def _fatal() -> BaseException | None:
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
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    said = {
        "message": f"{type(error).__name__}: {_message(error)}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    with suppress(OSError), open(path, "x") as file:  # noqa: PTH123
        json.dump({"message": said}, file)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _reached_store() -> bool:
    """Whether this process ever made its default process group, for which it must have reached the worker store."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and (c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None)
