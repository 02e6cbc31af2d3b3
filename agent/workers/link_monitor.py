"""Turns the workers' messages on their links into events, and sends the agent's messages to workers.

A worker that reports every step would wake the agent at every step. So messages wake the agent only on a link on which
it has sent one itself, since it expects an answer there. The other links wake it only when the worker or its program
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
from elaunch.agent.core.actions import TellWorkers
from elaunch.agent.core.events import LinkEvent, WorkerListens, WorkerSaved, WorkerSaving, WorkerStopped
from elaunch.agent.core.timeline import WorkersSeen
from elaunch.agent.output.run_dir import RunDir, Timeline
from elaunch.agent.workers.group import CurrentGroup, Reporter, WorkerGroup
from elaunch.agent.workers.link import Link, Note, StartMark
from elaunch.rendezvous.rules.reports import RankReport

# The mean time between two samples, each of which is up to a quarter earlier or later. Samples in step with the program
# would always find it in the same call.
_SAMPLE_S = 1.0
# A week of training is a few megabytes then.
EVERY_S = 10.0
_STAGES = {WorkerSaving: "saving", WorkerSaved: "saved", WorkerStopped: "at_boundary"}


class ProgressLog:
    """Stamps `progress` when a look at the links finds news, at most every EVERY_S. `steps_per_s` is of the last time.

    It has no timer: the agent looks at the links once a second in any case.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.steps_per_s = 0.0
        self._steps: list[int] = []
        self._at_s: float | None = None

    def begin(self) -> None:
        """A generation begins."""
        self._steps, self._at_s, self.steps_per_s = [], None, 0.0

    def look(self, group: WorkerGroup, now_s: float) -> None:
        """Stamp the first step at once, later ones when it is time."""
        if self._at_s is None or now_s - self._at_s >= EVERY_S:
            self.note(group, now_s)

    def note(self, group: WorkerGroup, now_s: float) -> None:
        """Stamp the newest steps, if there are any that the timeline has not."""
        links = [group.links[local_rank] for local_rank in sorted(group.links)]
        steps = [link.step for link in links]
        if steps == self._steps or max(steps, default=-1) < 0:
            self.steps_per_s = 0.0
            return
        fields: dict[str, object] = {"first_rank": group.rank(0), "steps": steps}
        if self._at_s is None:
            # What was restored, or lost, shows only in the first step of each rank, not in its newest.
            fields["first_steps"] = [link.first_step for link in links]
        elif (gained := max(steps) - max(self._steps)) > 0:
            self.steps_per_s = gained / (now_s - self._at_s)
            fields["steps_per_s"] = round(self.steps_per_s, 4)
        self._steps, self._at_s = steps, now_s
        self._timeline.stamp(group.generation, "progress", **fields)


class LinkMonitor:
    """Reads the links of the current generation's workers. `fileno` is readable when `read_ready` has work to do.

    Messages of workers are kept until `take_news` returns them. They must not queue in the inbox behind the events
    that the agent decides with their help. `on_hang_up` is called when a link has ended.
    """

    def __init__(
        self,
        current: CurrentGroup,
        reporter: Reporter,
        run_dir: RunDir,
        on_hang_up: Callable[[], None],
    ) -> None:
        self._current = current
        self._reporter = reporter
        self._timeline = reporter.timeline
        self._progress = ProgressLog(reporter.timeline)
        self._run_dir = run_dir
        self._on_hang_up = on_hang_up
        self._epoll = select.epoll()
        self._open: dict[int, Link] = {}
        self._sample_at_s = 0.0
        self._news: deque[LinkEvent] = deque()
        self._said: set[str] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock. None without open links."""
        return self._sample_at_s if self._open else None

    @property
    def steps_per_s(self) -> float:
        """How fast the workers were, over the last ten seconds or more."""
        return self._progress.steps_per_s

    def begin(self, group: WorkerGroup) -> None:
        """Read these workers' links from now on."""
        self._progress.begin()
        self._sample_at_s = time.monotonic() + _SAMPLE_S
        for link in group.links.values():
            self._open[link.fileno()] = link
            self._epoll.register(link, select.EPOLLRDHUP)

    def end(self, group: WorkerGroup) -> None:
        """Close these workers' links."""
        self._progress.note(group, time.monotonic())
        for link in group.links.values():
            self._drop(link)

    def read_ready(self) -> None:
        """Read the links that woke the loop."""
        for fd, _ in self._epoll.poll(0):
            self._read(self._open[fd])

    def tick(self, now_s: float) -> None:
        """Once a second, read all links."""
        if not self._open or now_s < self._sample_at_s:
            return
        self._sample_at_s = now_s + _SAMPLE_S * random.uniform(0.75, 1.25)
        for link in [*self._open.values()]:
            self._read(link)
            # Not `now_s`: the loop may have worked since then, and the worker has gone on.
            link.step_times.look(time.monotonic(), link.step, link.reports)
        self._progress.look(self._current.group, now_s)

    def read_all(self) -> None:
        """Read every link now, also those whose messages do not wake the agent."""
        for link in [*self._open.values()]:
            self._read(link)

    def take_news(self) -> Iterator[LinkEvent]:
        """The messages of workers since the last call, in the order in which each worker sent them."""
        while self._news:
            yield self._news.popleft()

    def seen(self, now_s: float, shares: Mapping[int, float]) -> WorkersSeen | None:
        """The workers of the current generation, for whoever asks how they are; None before the first one.

        `shares` has for which share of the last minutes each of them waited in collectives, by local rank.
        """
        group = self._current.latest
        if group is None:
            return None
        self.read_all()
        # `now_s` was before these modules were imported and the links were read.
        read_s = time.monotonic()
        ranks: list[RankReport] = []
        for local_rank in range(group.slots):
            link, pid = group.links.get(local_rank), group.pids.get(local_rank, -1)
            state = "stopped" if linux.state(pid) in ("T", "t") else "running"
            report = RankReport(group.rank(local_rank), local_rank, pid, state, wait_share=shares.get(local_rank))
            if link and link.reports:
                times = link.step_times
                ago_s = read_s - (times.reported_s or read_s)
                report = replace(report, step=link.step, phase=link.phase, step_s=times.step_s, reported_ago_s=ago_s)
            ranks.append(report)
        return WorkersSeen(group.generation, now_s - group.started_s, tuple(ranks))

    def tell(self, order: TellWorkers) -> None:
        """Send the message to these workers. From now on their messages wake the agent at once."""
        word = type(order.message).__name__
        self._timeline.stamp(order.generation, "told", message=word, workers=len(order.local_ranks))
        for local_rank in order.local_ranks:
            link = self._current.group.links[local_rank]
            if link.fileno() in self._open:
                link.tell(order.message)
                self._epoll.modify(link, select.EPOLLRDHUP | select.EPOLLIN)

    def _drop(self, link: Link) -> None:
        if self._open.pop(link.fileno(), None):
            # A process that another thread starts has a copy of the socket for a moment, which keeps it in the epoll.
            self._epoll.unregister(link)
        link.forget_recorder()
        link.socket.close()

    def _read(self, link: Link) -> None:
        """Read one link: keep the events for the agent's core. A note goes to the log at once."""
        if not link.read():
            self._drop(link)
            self._on_hang_up()
        rank = self._current.group.rank(link.local_rank)
        where = {"rank": rank, "local_rank": link.local_rank}
        for news in link.take_news():
            match news:
                case Note(text):
                    self._say_once(text, f"rank {rank}: {text}")
                    continue
                case StartMark(name, said_s):
                    self._timeline.stamp(link.generation, "marked", **where, name=name, said_s=said_s)
                    continue
                case WorkerSaving() | WorkerSaved() | WorkerStopped():
                    self._timeline.stamp(link.generation, _STAGES[type(news)], **where, step=news.step)
                case WorkerListens(to_failure=True) if trouble := self._run_dir.memory.trouble:
                    self._say_once(trouble, trouble)
            self._news.append(news)

    def _say_once(self, key: str, text: str) -> None:
        """Log `text` once per `key` in the agent's life, even if many workers and generations cause it."""
        if key not in self._said:
            self._said.add(key)
            self._reporter.warn(text)
