"""One generation's workers as their node's agent knows them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from elaunch.agent.links import Link
from elaunch.rendezvous.types import RankTable


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
