"""agent.workers.group: what a worker store says to its agent, over a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elaunch.agent.forkserver import wire
from elaunch.agent.workers import group
from elaunch.agent.workers.group import StoreControl
from tests.harness import DEADLINE_S, joined


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StoreControl, socket.socket]]:
    """The agent's end, which waits for an answer as long as it takes, and the socket of the worker store."""
    monkeypatch.setattr(group, "_ANSWER_S", DEADLINE_S)
    ours, theirs = wire.pair()
    ours.setblocking(False)
    with ours, theirs:
        yield StoreControl(ours), theirs


@pytest.mark.parametrize("keys", [0, 3])
def test_at_its_end_a_store_says_whether_a_rank_had_used_it(
    store: tuple[StoreControl, socket.socket], keys: int
) -> None:
    control, process = store
    wire.send(process, {"up": True})
    orders: list[object] = []

    def reply() -> None:
        order = wire.receive(process)
        orders.append(order and order[0])
        wire.send(process, {"keys": keys})

    thread = threading.Thread(target=reply)
    thread.start()
    said = control.end()
    joined(thread)

    assert (said, orders) == (keys > 0, [{"op": "end"}])


@pytest.mark.parametrize("reports", [[], [{"error": "no memory"}]])
def test_a_store_that_is_not_up_is_not_waited_for(
    store: tuple[StoreControl, socket.socket], reports: list[dict[str, Any]]
) -> None:
    control, process = store
    for report in reports:
        wire.send(process, report)

    assert control.end() is None

    assert wire.receive(process) is None, "the agent's end is closed, and nothing was ordered"


def test_a_store_that_a_rank_is_known_to_have_used_is_not_waited_for(
    store: tuple[StoreControl, socket.socket],
) -> None:
    control, process = store
    wire.send(process, {"up": True})

    assert control.end(is_used=True) is True

    assert wire.receive(process) is None, "the agent's end is closed, by which the store ends"


def test_the_error_of_a_store_is_kept_for_its_end(store: tuple[StoreControl, socket.socket]) -> None:
    control, process = store
    wire.send(process, {"error": "no memory"})
    process.close()

    assert control.last_error() == "failed: no memory"
