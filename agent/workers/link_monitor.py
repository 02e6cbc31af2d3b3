"""Turns the workers' messages on their links into events, and sends the agent's messages to workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from elaunch.agent import linux
from elaunch.agent.core import hang
from elaunch.agent.core.actions import TakeStacks, TellWorkers
from elaunch.agent.core.events import (
    LinkEvent,
    Reported,
    WorkerListens,
    WorkerSaved,
    WorkerSaving,
    WorkersHung,
    WorkerStopped,
)
from elaunch.agent.core.messages import ShowStacks
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers import stacks
from elaunch.agent.workers.group import CurrentGroup, WorkerGroup
from elaunch.agent.workers.link import Link, Links
from elaunch.agent.workers.reporter import Reporter
from elaunch.rendezvous.types import FailureKind


class LinkMonitor:
    """Reads the links of the current generation's workers. `fileno` is readable when `read_ready` has work to do.

    Messages of workers are kept until `take_news` returns them. They must not queue in the inbox behind the events
    that the agent decides with their help. Reports are counted only with a `hang_timeout_s`. `on_hang_up` is called
    when a link has ended.
    """

    def __init__(
        self,
        current: CurrentGroup,
        reporter: Reporter,
        run_dir: RunDir,
        hang_timeout_s: float,
        on_hang_up: Callable[[], None],
    ) -> None:
        self._current = current
        self._reporter = reporter
        self._timeline = reporter.timeline
        self._run_dir = run_dir
        self._hang_timeout_s = hang_timeout_s
        self._on_hang_up = on_hang_up
        self._links = Links()
        self._news: deque[LinkEvent | Reported] = deque()
        # When this generation's workers were first looked at.
        self._begun_s: float | None = None
        self._said: set[str] = set()

    def fileno(self) -> int:
        return self._links.fileno()

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        return self._links.due_s

    def begin(self, group: WorkerGroup) -> None:
        """Read these workers' links from now on."""
        self._begun_s = None
        for link in group.links.values():
            self._links.add(link)

    def end(self, group: WorkerGroup) -> None:
        """Close these workers' links."""
        for link in group.links.values():
            self._links.drop(link)

    def read_ready(self) -> None:
        """Read the links that woke the loop."""
        for link in self._links.ready():
            self._news += self._read(link)

    def tick(self, now_s: float) -> None:
        """Once a second, read all links, and count the reports."""
        if not (due := self._links.due(now_s)):
            return
        for link in due:
            self._news += self._read(link)
        if self._hang_timeout_s:
            group = self._current.group
            links = group.links
            reporting = frozenset(rank for rank, link in links.items() if link.reports)
            self._news.append(Reported(group.generation, sum(link.reports for link in links.values()), reporting))
            self._begun_s = self._begun_s or now_s
            if not reporting and now_s - self._begun_s > self._hang_timeout_s:
                self._say_once(
                    "no reports",
                    "no worker has reported a step yet, and --hang-timeout sees only those that do: with Keeper, or"
                    " elaunch.trainer.link",
                )

    def read_all(self) -> None:
        """Read every link now, also those whose messages do not wake the agent."""
        for link in self._links.open:
            self._news += self._read(link)

    def take_news(self) -> Iterator[LinkEvent | Reported]:
        """The messages of workers since the last call, in the order in which each worker sent them."""
        while self._news:
            yield self._news.popleft()

    def tell(self, order: TellWorkers) -> None:
        """Send the message to these workers. From now on their messages wake the agent at once."""
        word = type(order.message).__name__
        self._timeline.stamp(order.generation, "told", message=word, workers=len(order.local_ranks))
        for local_rank in order.local_ranks:
            self._links.tell(self._current.group.links[local_rank], order.message)

    def take_stacks(self, order: TakeStacks) -> None:
        """Have workers that listen write their stacks to the log. For the others a thread runs py-spy."""
        group, generation = self._current.group, order.generation
        self._timeline.stamp(generation, "hung", quiet_s=round(order.quiet_s))
        self.tell(TellWorkers(generation, order.listening, ShowStacks()))
        links = {rank: link for rank, link in group.links.items() if rank in order.local_ranks and link.reports}
        standings = {
            rank: hang.Standing(link.step, link.phase, linux.is_stopped(group.pids.get(rank, -1)))
            for rank, link in links.items()
        }
        local_rank, message = hang.who_hangs(standings, order.quiet_s)
        failure = replace(
            self._reporter.node_failure(FailureKind.HANG, generation, message),
            rank=group.rank(local_rank),
            local_rank=local_rank,
            pid=group.pids.get(local_rank, -1),
            log_path=group.log_files.get(local_rank, ""),
            progressed=True,
        )
        mute = order.local_ranks - order.listening
        pids = {group.rank(rank): pid for rank, pid in group.pids.items() if rank in mute}
        stacks.look_into(pids, self._reporter.say, partial(self._reporter.post, WorkersHung(generation, failure)))

    def _read(self, link: Link) -> list[LinkEvent]:
        """Read one link: the events for the agent's core. A note goes to the log at once."""
        if not link.read():
            self._links.drop(link)
            self._on_hang_up()
        rank = self._current.group.rank(link.local_rank)
        for text in link.take_notes():
            self._say_once(text, f"rank {rank}: {text}")
        news = link.take_news()
        for event in news:
            match event:
                case WorkerSaving(generation, local_rank, step):
                    self._timeline.stamp(generation, "saving", rank=rank, local_rank=local_rank, step=step)
                case WorkerSaved(generation, local_rank, step):
                    self._timeline.stamp(generation, "saved", rank=rank, local_rank=local_rank, step=step)
                case WorkerStopped(generation, local_rank, step):
                    self._timeline.stamp(generation, "at_boundary", rank=rank, local_rank=local_rank, step=step)
                case WorkerListens(to_failure=True) if trouble := self._run_dir.memory.trouble:
                    self._say_once(trouble, trouble)
        return news

    def _say_once(self, key: str, text: str) -> None:
        """Log `text` once per `key` in the agent's life, even if many workers and generations cause it."""
        if key not in self._said:
            self._said.add(key)
            self._reporter.say(text)
