"""One generation's workers as their node's agent knows them, and where news of them go."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elaunch.agent.config import Level
from elaunch.agent.core.events import Event
from elaunch.agent.core.timeline import NO_GENERATION
from elaunch.agent.diagnosis.flight_recorder import FlightRecorder
from elaunch.agent.forkserver import wire
from elaunch.agent.output.run_dir import Timeline
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.types import Failure, FailureKind, RankTable

_ANSWER_S = 0.5


class StoreControl:
    """The worker store reports that it is up, or why not; at its end whether a rank used it."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control

    def end(self, *, is_used: bool = False) -> bool | None:
        """End the store. Returns whether a rank has used it, or None if the store is not up.

        `is_used` says that a rank is known to have used it. The store ends then without having been asked.
        """
        with self._socket, suppress(OSError):
            if is_used:
                return True
            if "up" in self._report():
                wire.send(self._socket, {"op": "end"})
                select.select([self._socket], [], [], _ANSWER_S)
                return bool(self._report().get("keys"))
        return None

    def last_error(self) -> str:
        """The error that a store reported before it ended, in words. Empty if it reported none."""
        with self._socket, suppress(OSError):
            if error := self._report().get("error"):
                return f"failed: {error}"
        return ""

    def _report(self) -> dict[str, Any]:
        """The next report; empty where the store is gone. Raises BlockingIOError where none has come."""
        packet = wire.receive(self._socket)
        return packet[0] if packet else {}


@dataclass(frozen=True)
class Reporter:
    """Events go to `post`, sentences for the log to `tell`, stages of a generation to `timeline`.

    `node_failure(kind, generation, message)` makes a failure of this node that no rank has caused.
    """

    post: Callable[[Event], None]
    tell: Callable[[str, Level], None]
    timeline: Timeline
    node_failure: Callable[[FailureKind, int, str], Failure]

    def say(self, text: str) -> None:
        """Log a sentence."""
        self.tell(text, "info")

    def warn(self, text: str) -> None:
        """Log what may need a person."""
        self.tell(text, "warning")


# A program that ran this long counts as progress, even if it neither reports steps nor makes a process group.
LASTING_S = 600.0


@dataclass
class WorkerGroup:
    """This node's workers of one generation, by local rank.

    `store` controls the generation's worker store, if that is on this node and has not ended. `reached_store` says
    whether a rank has used that store. It is None if the store is on another node, or if that is not known yet.
    In `crash_fds` workers leave their stacks at a crash. `mixed` are workers whose stdout and stderr are one pipe.
    `is_interrupted` says that workers have got SIGINT.
    """

    table: RankTable
    group_rank: int
    links: dict[int, Link] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    forked_s: dict[int, float] = field(default_factory=dict)
    log_files: dict[int, str] = field(default_factory=dict)
    crash_fds: dict[int, int] = field(default_factory=dict)
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

    def lived_s(self, local_rank: int) -> float:
        """How long ago the worker was forked. Before that it waited for the fork server's imports."""
        return time.monotonic() - self.forked_s.get(local_rank, self.started_s)

    def rank(self, local_rank: int) -> int:
        return self.table.seats[self.group_rank].first_rank + local_rank


class CurrentGroup:
    """The one owner of the generation that this node runs, or ran last. Only `Workers` sets `latest`."""

    latest: WorkerGroup | None = None

    @property
    def group(self) -> WorkerGroup:
        """The workers. Do not read it before there are any."""
        assert self.latest is not None
        return self.latest

    @property
    def generation(self) -> int:
        """The number of the current generation, or NO_GENERATION."""
        return self.latest.generation if self.latest else NO_GENERATION

    def of(self, generation: object) -> WorkerGroup | None:
        """The workers of that generation, if it is the current one: news of another generation changes nothing."""
        return self.latest if self.generation == generation else None
