"""One generation's workers as their node's agent knows them, and where their events go."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elaunch.agent.core.events import Event
from elaunch.agent.diagnosis.exit_status import SILENT_S
from elaunch.agent.diagnosis.samplers import FlightRecorder
from elaunch.agent.output.run_dir import Timeline
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.types import Failure, FailureKind, RankTable


@dataclass(frozen=True)
class Reporter:
    """Events go to `post`, log lines to `log`, or to `warn` if they may need a person.

    Stages of a generation go to `timeline`.
    `node_failure(kind, generation, message)` makes a failure of this node that no rank has caused.
    """

    post: Callable[[Event], None]
    log: Callable[[str], None]
    warn: Callable[[str], None]
    timeline: Timeline
    node_failure: Callable[[FailureKind, int, str], Failure]
    _warned: set[str] = field(default_factory=set)

    def warn_once(self, key: str, text: str) -> bool:
        """Warn once per `key` in the agent's life, even if many workers and generations cause it. Returns whether."""
        is_first = key not in self._warned
        if is_first:
            self._warned.add(key)
            self.warn(text)
        return is_first


# A program that ran this long counts as progress, even if it neither reports steps nor makes a process group.
LASTING_S = 600.0


@dataclass
class Worker:
    """One worker. It is ordered first, and forked when the fork server has imported: `pid` is -1 until then.

    At a crash it leaves its stacks in `crash_fd`. `is_mixed`: its stdout and stderr are one pipe.
    """

    rank: int
    local_rank: int
    link: Link
    pid: int = -1
    since_s: float = field(default_factory=time.monotonic)
    crash_fd: int = -1
    log_path: str = ""
    is_mixed: bool = False
    failure: Failure | None = None

    def forked(self, pid: int) -> None:
        self.pid, self.since_s = pid, time.monotonic()

    @property
    def lived_s(self) -> float:
        """How long ago it was forked, or ordered if it was not forked yet."""
        return time.monotonic() - self.since_s


@dataclass
class WorkerGroup:
    """This node's workers of one generation; `workers` has those that were ordered, by local rank.

    `store` is the socket of the generation's worker store, if that is on this node and has not ended.
    `is_interrupted`: workers have got SIGINT. `parent_killed` is the failure of their parent process.
    """

    table: RankTable
    group_rank: int
    workers: list[Worker] = field(default_factory=list)
    is_interrupted: bool = False
    store: socket.socket | None = None
    parent_killed: Failure | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def pids(self) -> dict[int, int]:
        return {worker.local_rank: worker.pid for worker in self.workers if worker.pid > 0}

    @property
    def failures(self) -> dict[int, Failure]:
        """The failures by local rank; the parent process has none."""
        found = (*(worker.failure for worker in self.workers), self.parent_killed)
        return {failure.local_rank: failure for failure in found if failure}

    @property
    def recorders(self) -> dict[int, FlightRecorder]:
        """Those of the workers that have a process group, by local rank."""
        return {worker.local_rank: worker.link.recorder for worker in self.workers if worker.link.recorder}

    @property
    def node_id(self) -> str:
        """This node's id in the table. The node may have rejoined with another id since then."""
        return self.table.seats[self.group_rank].node_id

    @property
    def progressed(self) -> bool:
        """Whether a worker of this node reported a step or made its process group, or all ran for long.

        The ranks make the group together: if one reports that it did not, the others only wait at the store, and that
        is no progress. Programs that report nothing at all need not run for so long.
        """
        known = [worker.link.progressed for worker in self.workers if worker.link.progressed is not None]
        return any(known) or time.monotonic() - self.started_s >= (LASTING_S if known else SILENT_S)

    @property
    def generation(self) -> int:
        return self.table.generation

    @property
    def slots(self) -> int:
        return self.table.seats[self.group_rank].slots

    def rank(self, local_rank: int) -> int:
        return self.table.seats[self.group_rank].first_rank + local_rank
