"""What workers say reaches the agent's core before anything that is decided with it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.core.events import Event, WorkerListens
from elaunch.agent.workers.group import CurrentGroup, Reporter
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.link_monitor import LinkMonitor

GENERATION = 4


@dataclass
class LinkedGroup:
    """A worker's and the agent's end of a link, and its `LinkMonitor`; `posted` is what went into the agent's inbox."""

    monitor: LinkMonitor
    link: Link
    worker: socket.socket
    posted: list[Event] = field(default_factory=list)

    def says(self, **message: object) -> None:
        self.worker.send(json.dumps(message).encode() + b"\n")


@pytest.fixture
def linked() -> Iterator[LinkedGroup]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = Link(GENERATION, 0, ours)
    group: Any = SimpleNamespace(links={0: link}, generation=GENERATION, rank=lambda rank: rank)
    run_dir: Any = SimpleNamespace(memory=SimpleNamespace(trouble=""))
    others: Any = SimpleNamespace(stamp=lambda *_, **__: None)
    posted: list[Event] = []
    current = CurrentGroup()
    current.begin(group)
    reporter = Reporter(posted.append, lambda *_: None, others, others)
    monitor = LinkMonitor(current, reporter, run_dir, 0.0, lambda: None)
    monitor.begin(group)
    with ours, theirs:
        yield LinkedGroup(monitor, link, theirs, posted)


def test_what_the_look_of_each_second_reads_does_not_queue_behind_what_waits_in_the_inbox(linked: LinkedGroup) -> None:
    """Else the agent signals a worker that has asked to be told on its link."""
    linked.says(event="listens", stop=True, peer_failed=False)

    linked.monitor.tick(time.monotonic() + 2)
    linked.monitor.read_all()

    assert list(linked.monitor.take_news()) == [WorkerListens(GENERATION, 0, to_stop=True, to_failure=False)]
    assert not linked.posted


def test_a_word_is_handed_out_once(linked: LinkedGroup) -> None:
    linked.says(event="listens", stop=True, peer_failed=True)
    linked.monitor.read_all()
    assert len(list(linked.monitor.take_news())) == 1

    linked.monitor.read_all()

    assert not list(linked.monitor.take_news())
