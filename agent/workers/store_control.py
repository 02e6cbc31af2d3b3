"""The agent's end of a worker store's control socket."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

from elaunch.agent.forkserver import wire

_ANSWER_S = 0.5


class StoreControl:
    """The worker store reports once that it is up, or why it is not. At its end it reports whether a rank used it."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._is_up = False
        self._error = ""

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> bool:
        """Read the store's report, if it has come. Returns whether the store is up."""
        if not self._is_up and not self._error:
            with suppress(OSError):
                if news := wire.receive(self._socket):
                    self._is_up = "up" in news[0]
                    self._error = news[0].get("error", "")
        return self._is_up

    def end(self) -> bool | None:
        """End the store. Returns whether a rank has used it, or None if the store never reported that it was up."""
        with self._socket, suppress(OSError):
            if not self.read():
                return None
            wire.send(self._socket, {"op": "end"})
            select.select([self._socket], [], [], _ANSWER_S)
            answer = wire.receive(self._socket)
            return answer is not None and answer[0]["keys"] > 0
        return None

    def last_error(self) -> str:
        """The error that a store reported before it ended, in words. Empty if it reported none."""
        with self._socket:
            self.read()
        return f"failed: {self._error}" if self._error else ""
