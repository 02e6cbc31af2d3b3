"""One generation's workers as their node's agent knows them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elaunch.agent.core.entries import NO_GENERATION
from elaunch.agent.forkserver.client import Home
from elaunch.agent.workers.crash_file import CrashFile
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.store_control import StoreControl
from elaunch.rendezvous.types import Failure, RankTable

if TYPE_CHECKING:
    from elaunch.agent.workers.flight_recorder import FlightRecorder

# A program that ran this long counts as progress, even if it neither reports steps nor makes a process group.
LASTING_S = 600.0


@dataclass
class WorkerGroup:
    """This node's workers of one generation, by local rank. `cgroup` is the folder of their cgroup, or empty.

    `store` controls the generation's worker store, if that is on this node and has not ended. `reached_store` says
    whether a rank has used that store. It is None if the store is on another node, or if that is not known yet.
    `mixed` are workers whose stdout and stderr are one pipe. `is_interrupted` says that workers have got SIGINT.
    """

    table: RankTable
    group_rank: int
    cgroup: str = ""
    links: dict[int, Link] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    forked_s: dict[int, float] = field(default_factory=dict)
    error_files: dict[int, Path] = field(default_factory=dict)
    log_files: dict[int, str] = field(default_factory=dict)
    crash_files: dict[int, CrashFile] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    mixed: set[int] = field(default_factory=set)
    is_interrupted: bool = False
    store: StoreControl | None = None
    reached_store: bool | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def recorders(self) -> dict[int, FlightRecorder]:
        """What answers for the collectives of each worker that has a process group, by local rank."""
        return {rank: link.recorder for rank, link in self.links.items() if link.recorder}

    @property
    def home(self) -> Home:
        return Home(self.generation, self.cgroup)

    @property
    def node_id(self) -> str:
        """This node's id in the table. The node may have come back with another id since then."""
        return self.table.seats[self.group_rank].node_id

    @property
    def progressed(self) -> bool:
        """Whether a worker of this node reported a step or made its process group.

        If no worker has told about its process group, a worker store that was used counts as progress. The ranks make
        the group together: if one says that it did not, the others only wait at the store, and that is no progress.
        """
        links = self.links.values()
        known = [link.reached_store for link in links if link.reached_store is not None]
        return any(link.step >= 0 for link in links) or (any(known) if known else bool(self.reached_store))

    @property
    def has_used_store(self) -> bool:
        """Whether a worker of this node has a process group, or has said at its end that it had one."""
        return any(link.reached_store or link.recorder for link in self.links.values())

    @property
    def lasted(self) -> bool:
        """Whether the workers ran so long that they must have done something, even if the program reports nothing."""
        return time.monotonic() - self.started_s >= LASTING_S

    @property
    def generation(self) -> int:
        return self.table.generation

    @property
    def slots(self) -> int:
        """Workers of this node."""
        return self.table.seats[self.group_rank].slots

    def close_crash_files(self) -> None:
        while self.crash_files:
            self.crash_files.popitem()[1].close()

    def lived_s(self, local_rank: int) -> float:
        """How long ago the worker was forked. Before that it waited for the fork server's imports."""
        return time.monotonic() - self.forked_s.get(local_rank, self.started_s)

    def rank(self, local_rank: int) -> int:
        return self.table.seats[self.group_rank].first_rank + local_rank


class CurrentGroup:
    """The one owner of the generation that this node runs, or ran last. Only `Workers` calls `begin`."""

    def __init__(self) -> None:
        self._group: WorkerGroup | None = None

    def begin(self, group: WorkerGroup) -> None:
        self._group = group

    @property
    def latest(self) -> WorkerGroup | None:
        """The workers, None before the first `begin`."""
        return self._group

    @property
    def group(self) -> WorkerGroup:
        """The workers. Do not read it before the first `begin`."""
        assert self._group is not None
        return self._group

    @property
    def generation(self) -> int:
        """The number of the current generation. NO_GENERATION before the first `begin`."""
        return self._group.generation if self._group else NO_GENERATION

    def of(self, generation: object) -> WorkerGroup | None:
        """The workers of that generation, if it is the current one: news of another generation changes nothing."""
        return self._group if self._group and self._group.generation == generation else None
