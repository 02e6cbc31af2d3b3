"""agent.workers.store_control: what a worker store says to its agent, over a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from elaunch.agent.forkserver import wire
from elaunch.agent.workers.store_control import StoreControl


@pytest.fixture
def store() -> Iterator[tuple[StoreControl, socket.socket]]:
    """The agent's end, and the socket of the worker store's process."""
    ours, theirs = wire.pair()
    ours.setblocking(False)
    with ours, theirs:
        yield StoreControl(ours), theirs


def test_a_store_is_up_when_it_has_said_so(store: tuple[StoreControl, socket.socket]) -> None:
    control, process = store
    before = control.read()

    wire.send(process, {"up": True})

    assert (before, control.read()) == (False, True)


@pytest.mark.parametrize(("keys", "used"), [(0, False), (3, True)])
def test_at_its_end_a_store_says_whether_a_rank_had_used_it(
    store: tuple[StoreControl, socket.socket], keys: int, used: bool
) -> None:
    control, process = store
    wire.send(process, {"up": True})
    orders: list[object] = []

    def answer() -> None:
        order = wire.receive(process)
        orders.append(order and order[0])
        wire.send(process, {"keys": keys})

    thread = threading.Thread(target=answer)
    thread.start()
    said = control.end()
    thread.join()

    assert (said, orders) == (used, [{"op": "end"}])


def test_a_store_that_never_said_that_it_is_up_is_not_waited_for(store: tuple[StoreControl, socket.socket]) -> None:
    control, process = store

    assert control.end() is None

    assert wire.receive(process) is None, "the agent's end is closed, and nothing was ordered"


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
