"""The agent's ends of its workers' links: who has hung up, and now and then a look at what the others have said.

A worker that reports every step would wake the agent as often. Only an end wakes it, of the worker or of its program.
"""

from __future__ import annotations

import json
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

_LOOK_S = 1.0
_LINK_BYTES_MAX = 1 << 16


@dataclass
class Link:
    """The agent's end of one worker's link.

    `step` is the newest that the worker reported; `raised` says that its program ended by an exception, and
    `reached_store`, None until its program ended, that it had made its process group. `notes` are sentences for the
    log.
    """

    local_rank: int
    socket: socket.socket
    step: int = -1
    raised: bool = False
    reached_store: bool | None = None
    notes: list[str] = field(default_factory=list)
    rest: bytes = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def read(self) -> bool:
        """Take what has come; whether the worker is still there. What is no message is dropped."""
        try:
            data = self.socket.recv(_LINK_BYTES_MAX)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.rest = self.rest[-_LINK_BYTES_MAX:]
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                message = json.loads(line)
                match message["event"]:
                    case "progress":
                        self.step = int(message["step"])
                    case "note":
                        self.notes.append(str(message["text"]))
                    case "ended":
                        self.raised = bool(message["raised"])
                        self.reached_store = bool(message["reached_store"])
        return bool(data)

    def take_notes(self) -> list[str]:
        """The notes since the last call."""
        notes, self.notes = self.notes, []
        return notes


class Links:
    """The open links of a generation; `fileno` is readable when one of them has ended."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._open: dict[int, Link] = {}
        self._look_at_s = 0.0

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, link: Link) -> None:
        """Watch a link from now on."""
        if not self._open:
            self._look_at_s = time.monotonic() + _LOOK_S
        self._open[link.fileno()] = link
        self._epoll.register(link, select.EPOLLRDHUP)

    def drop(self, link: Link) -> None:
        """Close a link."""
        self._open.pop(link.fileno(), None)
        link.socket.close()

    def ended(self) -> list[Link]:
        """Those whose worker has hung up or said its last words; they are to be read until they are dropped."""
        return [self._open[fd] for fd, _ in self._epoll.poll(0)]

    @property
    def due_s(self) -> float | None:
        """When `due` will have some (monotonic)."""
        return self._look_at_s if self._open else None

    def due(self, now_s: float) -> list[Link]:
        """Those that are to be read now, all of them at once."""
        if not self._open or now_s < self._look_at_s:
            return []
        self._look_at_s = now_s + _LOOK_S
        return list(self._open.values())
