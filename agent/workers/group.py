"""One generation's workers on this node, and the monitor of their links.

The monitor turns the workers' messages into events, and sends the agent's messages to workers. A worker that reports
every step would wake the agent at every step. So messages wake the agent only on a link on which it has sent one
itself, since it expects a response there. The other links wake it only when the worker or its program ends. The agent
reads them once a second, and before each decision that may depend on them.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from elaunch.agent import linux
from elaunch.agent.core.actions import NotifyWorkers
from elaunch.agent.core.events import Event, LinkEvent, WorkerListens, WorkerSaved, WorkerSaving, WorkerStopped
from elaunch.agent.core.timeline import WorkersSeen
from elaunch.agent.diagnosis.exit_status import SILENT_S
from elaunch.agent.diagnosis.samplers import FlightRecorder
from elaunch.agent.output.run_dir import RunDir, Timeline
from elaunch.agent.workers.link import Link, StartMark
from elaunch.rendezvous.rules.reports import RankReport
from elaunch.rendezvous.types import Failure, FailureKind, RankTable

# A program that ran this long counts as progress, even if it neither reports steps nor makes a process group.
LASTING_S = 600.0
# The mean time between two samples, each of which is up to a quarter earlier or later. Samples in step with the program
# would always find it in the same call.
_SAMPLE_S = 1.0
# The period of the timeline's `progress` events: a week of training is a few megabytes.
EVERY_S = 10.0
_STAGES = {WorkerSaving: "saving", WorkerSaved: "saved", WorkerStopped: "at_boundary"}


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
        """Warn once per `key` in the agent's life, even if many workers and generations cause it. Returns if it did."""
        is_first = key not in self._warned
        if is_first:
            self._warned.add(key)
            self.warn(text)
        return is_first


@dataclass
class Worker:
    """One worker. It is ordered first, and forked when the fork server has imported: `pid` is -1 until then.

    At a crash faulthandler writes its stacks to `crash_fd`. `is_mixed`: its stdout and stderr are one pipe.
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

    @property
    def lived_s(self) -> float:
        """How long ago it was forked, or ordered if it was not forked yet."""
        return time.monotonic() - self.since_s


@dataclass
class WorkerGroup:
    """This node's workers of one generation; `workers` has those that were ordered, by local rank.

    `store` is the socket of the generation's worker store, if that is on this node and has not ended.
    `is_interrupted`: workers have received SIGINT. `parent_killed` is the failure of their parent process.
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


class LinkMonitor:
    """Reads the links of one generation's workers. `fileno` is readable when `read_ready` has work to do.

    Messages of workers are kept until `take_messages` returns them. They must not queue in the inbox behind the events
    that the agent decides with their help. `on_hang_up` is called when a link has ended. `steps_per_s` is the
    workers' speed over the last ten seconds or more.
    """

    def __init__(self, group: WorkerGroup, reporter: Reporter, run_dir: RunDir, on_hang_up: Callable[[], None]) -> None:
        self._group = group
        self._reporter = reporter
        self._timeline = reporter.timeline
        self._run_dir = run_dir
        self._on_hang_up = on_hang_up
        self._epoll = select.epoll()
        self._open = {worker.link.fileno(): worker for worker in group.workers}
        for fd in self._open:
            self._epoll.register(fd, select.EPOLLRDHUP)
        self._sample_at_s = time.monotonic() + _SAMPLE_S
        self._messages: deque[LinkEvent] = deque()
        self._steps: list[int] = []
        self._stamped_s: float | None = None
        self.steps_per_s = 0.0

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock. None without open links."""
        return self._sample_at_s if self._open else None

    def end(self) -> None:
        self._stamp_steps(time.monotonic())
        for worker in self._group.workers:
            self._drop(worker)
        self._epoll.close()

    def read_ready(self) -> None:
        """Read the links that woke the loop."""
        for fd, _ in self._epoll.poll(0):
            self._read(self._open[fd])

    def tick(self, now_s: float) -> None:
        """Once a second, read all links."""
        if not self._open or now_s < self._sample_at_s:
            return
        self._sample_at_s = now_s + _SAMPLE_S * random.uniform(0.75, 1.25)
        for worker in [*self._open.values()]:
            self._read(worker)
            link = worker.link
            # Not `now_s`: the loop may have worked since then, and the worker has continued.
            link.step_times.sample(time.monotonic(), link.step, link.reports)
        # The first step immediately, later ones when it is time.
        if self._stamped_s is None or now_s - self._stamped_s >= EVERY_S:
            self._stamp_steps(now_s)

    def read_all(self) -> None:
        """Read every link now, also those whose messages do not wake the agent."""
        for worker in [*self._open.values()]:
            self._read(worker)

    def take_messages(self) -> Iterator[LinkEvent]:
        """The messages of workers since the last call, in the order in which each worker sent them."""
        while self._messages:
            yield self._messages.popleft()

    def seen(self, now_s: float, shares: Mapping[int, float]) -> WorkersSeen | None:
        """The state of the current generation's workers; None before the first one.

        `shares` is the share of the last minutes that each of them waited in collectives, by local rank.
        """
        if not self._group.workers:
            return None
        self.read_all()
        # `now_s` was before the links were read.
        read_s = time.monotonic()
        ranks: list[RankReport] = []
        for worker in self._group.workers:
            link, local_rank = worker.link, worker.local_rank
            state = "stopped" if linux.state(worker.pid) in ("T", "t") else "running"
            report = RankReport(worker.rank, local_rank, worker.pid, state, wait_share=shares.get(local_rank))
            if link.reports:
                times = link.step_times
                ago_s = read_s - (times.reported_s or read_s)
                report = replace(report, step=link.step, phase=link.phase, step_s=times.step_s, reported_ago_s=ago_s)
            ranks.append(report)
        return WorkersSeen(self._group.generation, now_s - self._group.started_s, tuple(ranks))

    def notify(self, order: NotifyWorkers) -> None:
        """Send the message to these workers. From now on their messages wake the agent."""
        name = type(order.message).__name__
        self._timeline.stamp(order.generation, "told", message=name, workers=len(order.local_ranks))
        for worker in self._group.workers:
            if worker.local_rank in order.local_ranks and worker.link.fileno() in self._open:
                worker.link.send(order.message)
                self._epoll.modify(worker.link, select.EPOLLRDHUP | select.EPOLLIN)

    def _drop(self, worker: Worker) -> None:
        link = worker.link
        if self._open.pop(link.fileno(), None):
            # A process that another thread starts has a copy of the socket for a moment, which keeps it in the epoll.
            self._epoll.unregister(link)
        link.forget_recorder()
        link.socket.close()

    def _read(self, worker: Worker) -> None:
        """Read one link: keep the events for the agent's core. A note goes straight to the log."""
        link, rank = worker.link, worker.rank
        if not link.read():
            self._drop(worker)
            self._on_hang_up()
        where = {"rank": rank, "local_rank": worker.local_rank}
        messages, link.messages = link.messages, []
        for message in messages:
            match message:
                case str():
                    self._reporter.warn_once(message, f"rank {rank}: {message}")
                    continue
                case StartMark(name, at_s):
                    self._timeline.stamp(link.generation, "marked", **where, name=name, said_s=at_s)
                    continue
                case WorkerSaving() | WorkerSaved() | WorkerStopped():
                    self._timeline.stamp(link.generation, _STAGES[type(message)], **where, step=message.step)
                case WorkerListens(to_failure=True) if trouble := self._run_dir.memory_trouble:
                    self._reporter.warn_once(trouble, trouble)
            self._messages.append(message)

    def _stamp_steps(self, now_s: float) -> None:
        """Stamp the newest steps, unless the timeline has them."""
        links = [worker.link for worker in self._group.workers]
        steps = [link.step for link in links]
        if steps == self._steps or max(steps, default=-1) < 0:
            self.steps_per_s = 0.0
            return
        fields: dict[str, object] = {"first_rank": self._group.rank(0), "steps": steps}
        if (total := max(link.total for link in links)) > 0:
            fields["total"] = total
        if self._stamped_s is None:
            # Only the first step of each rank shows what was restored or lost, not its newest.
            fields["first_steps"] = [link.first_step for link in links]
        elif (gained := max(steps) - max(self._steps)) > 0:
            self.steps_per_s = gained / (now_s - self._stamped_s)
            fields["steps_per_s"] = round(self.steps_per_s, 4)
        self._steps, self._stamped_s = steps, now_s
        self._timeline.stamp(self._group.generation, "progress", **fields)
