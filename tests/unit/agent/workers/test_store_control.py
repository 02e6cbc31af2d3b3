"""agent.workers.store_control: what a worker store says to its agent, over a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elaunch.agent.forkserver import wire
from elaunch.agent.workers import store_control
from elaunch.agent.workers.store_control import StoreControl
from tests.harness import DEADLINE_S, joined


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StoreControl, socket.socket]]:
    """The agent's end, which waits for an answer as long as it takes, and the socket of the worker store."""
    monkeypatch.setattr(store_control, "_ANSWER_S", DEADLINE_S)
    ours, theirs = wire.pair()
    ours.setblocking(False)
    with ours, theirs:
        yield StoreControl(ours), theirs


def test_a_store_is_up_when_it_has_said_so(store: tuple[StoreControl, socket.socket]) -> None:
    control, process = store
    before = control.read()

    wire.send(process, {"up": True})

    assert (before, control.read()) == (False, True)


@pytest.mark.parametrize(
    ("reports", "answer", "used"),
    [
        ([{"up": True}], {"keys": 0}, False),
        ([{"up": True}], {"keys": 3}, True),
        ([{"idle": True}], {"keys": 0}, False),
        ([{"idle": True}, {"idle": False}, {"up": True}], {"keys": 3}, True),
        ([{"idle": True}], {"idle": False}, None),
    ],
)
def test_at_its_end_a_store_says_whether_a_rank_had_used_it(
    store: tuple[StoreControl, socket.socket],
    reports: list[dict[str, Any]],
    answer: dict[str, Any],
    used: bool | None,
) -> None:
    control, process = store
    for report in reports:
        wire.send(process, report)
    orders: list[object] = []

    def reply() -> None:
        order = wire.receive(process)
        orders.append(order and order[0])
        wire.send(process, answer)

    thread = threading.Thread(target=reply)
    thread.start()
    said = control.end()
    joined(thread)

    assert (said, orders) == (used, [{"op": "end"}])


@pytest.mark.parametrize("reports", [[], [{"idle": True}, {"idle": False}], [{"error": "no memory"}]])
def test_a_store_that_is_neither_idle_nor_up_is_not_waited_for(
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


def test_a_store_settles_once_it_is_up(
    store: tuple[StoreControl, socket.socket],
) -> None:
    control, process = store
    stages = []

    for report in ({"idle": True}, {"idle": False}, {"up": True}):
        wire.send(process, report)
        stages.append((control.read(), control.is_settled))

    assert stages == [(False, False), (False, False), (True, True)]


def test_a_store_that_died_after_it_was_up_leaves_no_answer(store: tuple[StoreControl, socket.socket]) -> None:
    control, process = store
    wire.send(process, {"up": True})
    process.close()

    assert control.end() is None


def test_the_error_of_a_store_is_kept_for_its_end(store: tuple[StoreControl, socket.socket]) -> None:
    control, process = store
    wire.send(process, {"error": "no memory"})
    process.close()

    assert control.last_error() == "failed: no memory"


def test_a_store_that_was_killed_says_nothing(store: tuple[StoreControl, socket.socket]) -> None:
    control, process = store
    process.close()

    assert control.last_error() == ""
