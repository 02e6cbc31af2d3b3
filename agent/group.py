"""One generation's workers as their node's agent knows them."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elaunch.rendezvous.types import RankTable

_LINK_BYTES_MAX = 1 << 16


@dataclass
class Link:
    """The agent's end of one worker's link.

    `step` is the newest that the worker reported; `raised` says that its program ended by an exception, and
    `reached_store`, None until its program ended, that it had made its process group.
    """

    local_rank: int
    socket: socket.socket
    step: int = -1
    raised: bool = False
    reached_store: bool | None = None
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
                    case "ended":
                        self.raised = bool(message["raised"])
                        self.reached_store = bool(message["reached_store"])
        return bool(data)


@dataclass
class Group:
    """This node's workers of one generation; `cgroup` is the folder of theirs, or empty.

    `store` is the agent's end of its worker store's control socket; `store_up` and `store_error` are what came there.
    """

    table: RankTable
    group_rank: int
    cgroup: str = ""
    links: dict[int, Link] = field(default_factory=dict)
    error_files: dict[int, Path] = field(default_factory=dict)
    log_files: dict[int, str] = field(default_factory=dict)
    store: socket.socket | None = None
    store_up: bool = False
    store_error: str = ""
    reached_store: bool = False

    @property
    def generation(self) -> int:
        return self.table.generation

    @property
    def slots(self) -> int:
        """Workers of this node."""
        return self.table.seats[self.group_rank].slots

    def rank(self, local_rank: int) -> int:
        return self.table.seats[self.group_rank].first_rank + local_rank
