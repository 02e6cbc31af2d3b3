"""agent.workers.fork_server_monitor: what the agent asks its fork server, and who answers."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.forkserver import wire
from elaunch.agent.workers.fork_server_monitor import ForkServerMonitor


class Server:
    """A fork server that never answers, and its successor."""

    preload = ("torch",)
    pid = 1

    def __init__(self) -> None:
        self.ours, self.theirs = wire.pair()
        self.asked = 0

    def fileno(self) -> int:
        return self.ours.fileno()

    def ping(self) -> None:
        self.asked += 1


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.ours.close()
    made.theirs.close()


@pytest.fixture
def monitor(server: Server) -> Iterator[ForkServerMonitor]:
    group: Any = SimpleNamespace(slots=1)
    current: Any = SimpleNamespace(group=group, generation=1)
    reporter: Any = SimpleNamespace(timeline=SimpleNamespace(stamp=lambda *_args, **_fields: None))
    monitored: Any = server
    exits: Any = None
    with selectors.DefaultSelector() as selector:
        yield ForkServerMonitor(monitored, current, exits, reporter, selector)


def test_a_fork_server_that_imports_is_not_asked_about_links_of_its_predecessors_workers(
    server: Server, monitor: ForkServerMonitor
) -> None:
    """It answers after the import only, and would be replaced as a silent one: again and again on a busy host."""
    monitor._patience_until_s = None

    monitor.check()

    assert server.asked == 0
    assert monitor.due_s is None
