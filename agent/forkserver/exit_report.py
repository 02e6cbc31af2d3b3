"""A worker's last words to its agent: that its program is over, and of which exception.

Python prints the exception and then still has a way to go, on which it can hang: threads, atexit, destructors.
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
    """Have them said when the program is over, before Python waits for its threads; the link, for `tell`."""
    pid = os.getpid()
    # The number may be given to another file later; a socket's inode is its own.
    link = os.fstat(LINK_FD).st_ino

    def say() -> None:
        # A child that the program forked comes through here too; its end is its own.
        if os.getpid() != pid:
            return
        error = _fatal()
        if error is not None:
            _record(error)
        tell(link, {"event": "ended", "raised": error is not None, "reached_store": _reached_store()}, last=True)

    # Said first of all that is registered with it; concurrent.futures has its place there for the same reason.
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    register(say)
    return link


def tell(link: int, said: dict[str, Any], last: bool = False) -> None:
    """Send a message on the link, the socket with that inode, if it is still there.

    The agent looks now and then; the `last` message wakes it.
    """
    with suppress(OSError):
        if os.fstat(LINK_FD).st_ino == link:
            with socket.socket(fileno=os.dup(LINK_FD)) as end:
                # A full link is the agent's trouble; the program does not wait for it.
                with suppress(BlockingIOError):
                    end.send(b"\n" + json.dumps(said).encode() + b"\n", socket.MSG_DONTWAIT)
                if last:
                    end.shutdown(socket.SHUT_WR)


def _fatal() -> BaseException | None:
    """The exception that ended the program, if one did.

    Python leaves it in `sys.last_value`; but so do consoles, debuggers and pytest with those that they have dealt with.
    A program's last one has come up through `__main__`, or through runpy above it.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None or error.__traceback__ is None:
        return None
    outermost = error.__traceback__.tb_frame
    file = outermost.f_code.co_filename
    # What was typed into a console runs in `__main__` too, and has no file.
    is_main = outermost.f_globals is vars(sys.modules["__main__"]) and (file == "<stdin>" or file[:1] != "<")
    return error if is_main or file == "<frozen runpy>" or file.endswith(f"{os.sep}runpy.py") else None


def _record(error: BaseException) -> None:
    """Leave the exception in TORCHELASTIC_ERROR_FILE in the form of torch's `@record`, whose own record wins."""
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
    """Whether this process ever made its default process group, which starts with a visit to the worker store."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and (c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None)
