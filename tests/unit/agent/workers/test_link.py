"""The agent's ends of the links: an end wakes it; a word does so only where the agent has spoken."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator

import pytest

from elaunch.agent.core.actions import PeerFailed, ShowStacks, StopAtStepBoundary, StopReason
from elaunch.agent.core.events import (
    WorkerEnded,
    WorkerListens,
    WorkerSaved,
    WorkerSaving,
    WorkerStopped,
)
from elaunch.agent.workers.link import Link, Links


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Link(4, 0, ours), theirs


def says(worker: socket.socket, **message: object) -> None:
    worker.send(json.dumps(message).encode() + b"\n")


def is_readable(links: Links) -> bool:
    return bool(select.select([links], [], [], 0)[0])


def test_a_word_wakes_nobody_and_is_read_when_it_is_time(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair
    links = Links()
    links.add(link)

    says(worker, event="progress", step=7)

    assert not is_readable(links)
    assert links.due_s is not None
    assert links.due(links.due_s - 0.01) == []
    assert links.due(links.due_s) == [link]
    assert link.read()
    assert link.step == 7


@pytest.mark.parametrize("end", ["dies", "has said its last"])
def test_an_end_wakes_and_the_words_before_it_are_there(pair: tuple[Link, socket.socket], end: str) -> None:
    link, worker = pair
    links = Links()
    links.add(link)

    says(worker, event="progress", step=3)
    says(worker, event="ended", raised=True, reached_store=False)
    if end == "dies":
        worker.close()
    else:
        worker.shutdown(socket.SHUT_WR)

    assert is_readable(links)
    assert links.ready() == [link]
    assert not link.read()
    assert (link.step, link.raised, link.reached_store) == (3, True, False)


def test_what_the_agent_is_to_know_is_taken_once_and_in_its_order(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair

    says(worker, event="listens", stop=True, peer_failed=False)
    says(worker, event="progress", step=6)
    says(worker, event="phase", name="evaluating")
    says(worker, event="stopped", step=7)
    says(worker, event="saving", step=8)
    says(worker, event="saved", step=8)
    says(worker, event="ended", raised=True, reached_store=True, monotonic_s=2.5)
    says(worker, event="ended", raised=True, reached_store=True, monotonic_s=2.5)
    link.read()

    assert link.take_news() == [
        WorkerListens(4, 0, to_stop=True, to_failure=False),
        WorkerStopped(4, 0, 7),
        WorkerSaving(4, 0, 8),
        WorkerSaved(4, 0, 8),
        WorkerEnded(4, 0, 2.5, raised=True),
    ]
    assert link.take_news() == []
    assert (link.step, link.phase, link.reports) == (6, "evaluating", 2)


def test_what_comes_behind_a_descriptor_is_read_at_once(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(worker, [b'{"event": "recorder"}\n'], [theirs.fileno()])
        says(worker, event="listens", stop=True, peer_failed=True)
        link.read()

    assert link.take_news() == [WorkerListens(4, 0, to_stop=True, to_failure=True)]
    link.forget_recorder()


def test_an_error_of_a_collective_that_tells_of_a_lost_peer_counts_until_the_next_group(
    pair: tuple[Link, socket.socket],
) -> None:
    link, worker = pair
    error = {"event": "error", "call": "all_reduce", "exception": "RuntimeError"}
    says(worker, **error, message="tensors must be contiguous")
    link.read()
    assert link.lost is None

    says(worker, **error, message="[pair.cc:553] Connection closed by peer [::1]:7")
    link.read()
    assert link.lost
    assert (link.lost.call, link.lost.exception) == ("all_reduce", "RuntimeError")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(worker, [b'{"event": "recorder"}\n'], [theirs.fileno()])
        link.read()
    assert link.lost is None
    link.forget_recorder()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (StopAtStepBoundary(StopReason.JOIN), {"event": "stop_at_step_boundary", "reason": "join"}),
        (PeerFailed(3), {"event": "peer_failed", "generation": 3}),
        (ShowStacks(), {"event": "stacks"}),
    ],
)
def test_who_is_told_something_is_heard_at_once_from_then_on(
    pair: tuple[Link, socket.socket],
    message: StopAtStepBoundary | PeerFailed | ShowStacks,
    line: dict[str, object],
) -> None:
    link, worker = pair
    links = Links()
    links.add(link)
    says(worker, event="progress", step=1)
    before = is_readable(links)

    links.tell(link, message)

    told = worker.recv(1 << 10)
    assert told.endswith(b"\n")
    assert json.loads(told) == line
    assert not before
    assert links.ready() == [link]
    link.read()
    assert not is_readable(links)
    says(worker, event="saved", step=1)
    assert is_readable(links)
