"""The worker's line to its agent: `report(step)` after each step, from any training script.

The agent leaves one end of a socket pair in the worker and its number in `ELAUNCH_LINK`; JSON lines go over it.
Without the variable nothing happens, so that a script needs no condition around the call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time

# The agent looks once a second; a line for each of a thousand steps would only fill the socket.
_PAUSE_S = 0.05


def report(step: int) -> None:
    """Say that optimizer step `step` is complete; call it after each one, from one thread.

    Never waits and never raises. A step that comes too soon after the one that was said last is left out.
    """
    _open_link().send_step(step, time.monotonic())


class _Link:
    """One end of a stream socket on which whole lines are sent or dropped, or no socket at all."""

    def __init__(self, end: socket.socket | None) -> None:
        self._end = end
        self._rest = b""
        self._next_s = 0.0

    def send_step(self, step: int, now_s: float) -> None:
        if now_s >= self._next_s:
            self._next_s = now_s + _PAUSE_S
            self.send(b'{"event": "progress", "step": %d}\n' % step)

    def send(self, line: bytes) -> None:
        # A line that went out in part must be finished first, or the agent would read two lines as one.
        if self._end is None or (self._rest and not self._push(self._rest)):
            return
        self._push(line)

    def close(self) -> None:
        if self._end is not None:
            with contextlib.suppress(OSError):
                self._end.close()
        self._end = None

    def _push(self, content: bytes) -> bool:
        """Send what fits now; keep the rest of a line that fitted in part. Whether all of it is out."""
        assert self._end is not None
        try:
            sent = self._end.send(content, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            self.close()
            return False
        self._rest = content[sent:]
        return not self._rest


@functools.cache
def _open_link() -> _Link:
    # Taken out: a program that this process starts would find a number there that means nothing to it.
    link = _Link(_inherited(os.environ.pop("ELAUNCH_LINK", "")))
    os.register_at_fork(after_in_child=link.close)
    return link


def _inherited(number: str) -> socket.socket | None:
    """The socket with that descriptor number, close-on-exec from now on; None where there is no such socket."""
    try:
        end = socket.socket(fileno=int(number))
    except (ValueError, OSError):
        return None
    if end.family != socket.AF_UNIX or end.type != socket.SOCK_STREAM:
        end.detach()
        return None
    end.set_inheritable(False)
    return end
