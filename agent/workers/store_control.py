"""The agent's end of a worker store's control socket."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

from elaunch.agent.forkserver import wire

_ANSWER_S = 0.5


class StoreControl:
    """The worker store reports whether it is idle, since no rank has connected yet; then that it is up, or why not.

    At its end it reports whether a rank used it.
    """

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._is_idle = False
        self._is_up = False
        self._is_gone = False
        self._error = ""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to be read before the end: it is up, or it failed, or it is gone."""
        return self._is_up or self._is_gone or bool(self._error)

    def read(self) -> bool:
        """Read the store's reports that have come. Returns whether the store is up."""
        with suppress(OSError):
            while not self.is_settled:
                news = wire.receive(self._socket)
                said = news[0] if news else {}
                self._is_gone = news is None
                self._is_idle = said.get("idle", False) is True
                self._is_up = "up" in said
                self._error = said.get("error", "")
        return self._is_up

    def end(self, *, is_used: bool = False) -> bool | None:
        """End the store. Returns whether a rank has used it, or None if the store is neither idle nor up.

        `is_used` says that a rank is known to have used it. The store ends then without having been asked.
        """
        with self._socket, suppress(OSError):
            if is_used:
                return True
            if not self.read() and not self._is_idle:
                return None
            wire.send(self._socket, {"op": "end"})
            select.select([self._socket], [], [], _ANSWER_S)
            answer = wire.receive(self._socket)
            # A store that begins to import torch at this moment has no number.
            keys = answer[0].get("keys") if answer else 0
            return None if keys is None else keys > 0
        return None

    def last_error(self) -> str:
        """The error that a store reported before it ended, in words. Empty if it reported none."""
        with self._socket:
            self.read()
        return f"failed: {self._error}" if self._error else ""
