"""Turns the workers' messages on their links into events, and sends the agent's messages to workers.

A worker that reports every step would wake the agent at every step. So messages wake the agent only on a link on which
it has sent one itself, since it expects a response there. The other links wake it only when the worker or its program
ends. The agent reads them once a second, and before each decision that may depend on them.
"""

from __future__ import annotations

import random
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from elaunch.agent import linux
from elaunch.agent.core.actions import NotifyWorkers
from elaunch.agent.core.events import LinkEvent, WorkerListens, WorkerSaved, WorkerSaving, WorkerStopped
from elaunch.agent.core.timeline import WorkersSeen
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers.group import Reporter, Worker, WorkerGroup
from elaunch.agent.workers.link import Note, StartMark
from elaunch.rendezvous.rules.reports import RankReport

# The mean time between two samples, each of which is up to a quarter earlier or later. Samples in step with the program
# would always find it in the same call.
_SAMPLE_S = 1.0
# A week of training is a few megabytes then.
EVERY_S = 10.0
_STAGES = {WorkerSaving: "saving", WorkerSaved: "saved", WorkerStopped: "at_boundary"}


class LinkMonitor:
    """Reads the links of one generation's workers. `fileno` is readable when `read_ready` has work to do.

    Messages of workers are kept until `take_messages` returns them. They must not queue in the inbox behind the events
    that the agent decides with their help. `on_hang_up` is called when a link has ended. `steps_per_s` is how fast the
    workers were, over the last ten seconds or more.
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

        `shares` has for which share of the last minutes each of them waited in collectives, by local rank.
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
        for message in link.take_messages():
            match message:
                case Note(text):
                    self._reporter.warn_once(text, f"rank {rank}: {text}")
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
        """Stamp the newest steps, if there are any that the timeline has not."""
        links = [worker.link for worker in self._group.workers]
        steps = [link.step for link in links]
        if steps == self._steps or max(steps, default=-1) < 0:
            self.steps_per_s = 0.0
            return
        fields: dict[str, object] = {"first_rank": self._group.rank(0), "steps": steps}
        if self._stamped_s is None:
            # What was restored, or lost, shows only in the first step of each rank, not in its newest.
            fields["first_steps"] = [link.first_step for link in links]
        elif (gained := max(steps) - max(self._steps)) > 0:
            self.steps_per_s = gained / (now_s - self._stamped_s)
            fields["steps_per_s"] = round(self.steps_per_s, 4)
        self._steps, self._stamped_s = steps, now_s
        self._timeline.stamp(self._group.generation, "progress", **fields)
