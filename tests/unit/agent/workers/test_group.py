"""agent.workers.group: when workers have made progress, and when their messages reach the agent's core."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.core.actions import NotifyWorkers, ShowStacks
from elaunch.agent.core.events import Event, WorkerListens
from elaunch.agent.diagnosis.exit_status import SILENT_S
from elaunch.agent.workers.group import LASTING_S, LinkMonitor, Reporter, Worker, WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.types import RankTable, Seat

GENERATION = 4


@dataclass
class LinkedGroup:
    """A worker's and the agent's end of a link, and its `LinkMonitor`; `posted` is what went into the agent's inbox."""

    monitor: LinkMonitor
    link: Link
    worker: socket.socket
    posted: list[Event] = field(default_factory=list)

    def send(self, **message: object) -> None:
        self.worker.send(json.dumps(message).encode() + b"\n")


@pytest.fixture
def linked() -> Iterator[LinkedGroup]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = Link(GENERATION, 0, ours)
    group = WorkerGroup(RankTable(GENERATION, (Seat("node-a-00000001", 1, 0),), "", 0, ""), 0, [Worker(0, 0, link)])
    run_dir: Any = SimpleNamespace(memory_trouble="")
    others: Any = SimpleNamespace(stamp=lambda *_, **__: None)
    posted: list[Event] = []
    reporter = Reporter(posted.append, others, others, others, others)
    monitor = LinkMonitor(group, reporter, run_dir, lambda: None)
    with ours, theirs:
        yield LinkedGroup(monitor, link, theirs, posted)


def is_readable(monitor: LinkMonitor) -> bool:
    return bool(select.select([monitor], [], [], 0)[0])


def test_a_message_wakes_no_agent_and_is_read_when_it_is_time(linked: LinkedGroup) -> None:
    """It does not queue behind what waits in the inbox: else the agent signals a worker that wants a message."""
    linked.send(event="progress", step=7)
    linked.send(event="listens", stop=True, peer_failed=False)

    assert not is_readable(linked.monitor)
    assert linked.monitor.due_s is not None
    linked.monitor.tick(linked.monitor.due_s - 0.01)
    before = linked.link.step
    linked.monitor.tick(linked.monitor.due_s)
    linked.monitor.read_all()

    assert (before, linked.link.step) == (-1, 7)
    assert list(linked.monitor.take_messages()) == [WorkerListens(GENERATION, 0, to_stop=True, to_failure=False)]
    assert not list(linked.monitor.take_messages())
    assert not linked.posted


@pytest.mark.parametrize("end", ["dies", "has sent its last"])
def test_an_end_wakes_and_the_messages_before_it_are_there(linked: LinkedGroup, end: str) -> None:
    linked.send(event="progress", step=3)
    linked.send(event="ended", raised=True, reached_store=False)
    if end == "dies":
        linked.worker.close()
    else:
        linked.worker.shutdown(socket.SHUT_WR)

    assert is_readable(linked.monitor)
    linked.monitor.read_ready()

    assert (linked.link.step, linked.link.raised, linked.link.reached_store) == (3, True, False)
    assert linked.monitor.due_s is None


def test_messages_of_a_worker_that_got_one_wake_the_agent(linked: LinkedGroup) -> None:
    linked.send(event="progress", step=1)
    before = is_readable(linked.monitor)

    linked.monitor.notify(NotifyWorkers(GENERATION, frozenset({0}), ShowStacks()))

    assert not before
    assert is_readable(linked.monitor)
    linked.monitor.read_ready()
    assert not is_readable(linked.monitor)
    linked.send(event="saved", step=1)
    assert is_readable(linked.monitor)


def group(*links: tuple[int, bool | None], age_s: float = 1.0) -> WorkerGroup:
    """One with links that reported this of their newest step and of their process group."""
    with socket.socket() as closed:
        pass
    made = [Worker(n, n, Link(0, n, closed, step, reached_store=at)) for n, (step, at) in enumerate(links)]
    return WorkerGroup(
        RankTable(4, (Seat("node-a-00000001", 2, 0),), "", 0, ""), 0, made, started_s=time.monotonic() - age_s
    )


@pytest.mark.parametrize(
    ("links", "age_s", "progressed"),
    [
        (((-1, None), (0, None)), 1.0, True),
        (((-1, True), (-1, None)), 1.0, True),
        (((-1, None), (-1, None)), 1.0, False),
        (((-1, None), (-1, None)), SILENT_S, True),
        (((-1, None), (-1, False)), SILENT_S, False),
        (((-1, None), (-1, False)), LASTING_S, True),
    ],
    ids=["a step", "a process group", "nothing", "nothing for long", "one did not get there", "nor in long"],
)
def test_progress_is_a_step_or_a_process_group_or_a_long_life(
    links: tuple[tuple[int, bool | None], ...], age_s: float, progressed: bool
) -> None:
    assert group(*links, age_s=age_s).progressed is progressed
