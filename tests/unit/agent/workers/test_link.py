"""The agent's end of a link: what it reads, and what it sends."""

from __future__ import annotations

import json
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
from elaunch.agent.workers.link import Link


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Link(4, 0, ours), theirs


def send(worker: socket.socket, **message: object) -> None:
    worker.send(json.dumps(message).encode() + b"\n")


def test_what_the_agent_is_to_know_is_taken_once_and_in_its_order(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair

    send(worker, event="listens", stop=True, peer_failed=False)
    send(worker, event="progress", step=5, total=9)
    send(worker, event="progress", step=6)
    send(worker, event="progress", step=7, total=True)
    send(worker, event="phase", name="evaluating")
    send(worker, event="stopped", step=7)
    send(worker, event="saving", step=8)
    send(worker, event="saved", step=8)
    send(worker, event="ended", raised=True, reached_store=True, monotonic_s=2.5)
    send(worker, event="ended", raised=True, reached_store=True, monotonic_s=2.5)
    link.read()

    assert link.messages == [
        WorkerListens(4, 0, to_stop=True, to_failure=False),
        WorkerStopped(4, 0, 7),
        WorkerSaving(4, 0, 8),
        WorkerSaved(4, 0, 8),
        WorkerEnded(4, 0, 2.5, raised=True),
    ]
    assert (link.step, link.total, link.phase, link.reports) == (6, 9, "evaluating", 3)


def test_what_comes_behind_a_descriptor_is_read_with_it(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(worker, [b'{"event": "recorder"}\n'], [theirs.fileno()])
        send(worker, event="listens", stop=True, peer_failed=True)
        link.read()

    assert link.messages == [WorkerListens(4, 0, to_stop=True, to_failure=True)]
    link.forget_recorder()


def test_an_error_of_a_collective_of_a_lost_peer_counts_until_the_next_group(
    pair: tuple[Link, socket.socket],
) -> None:
    link, worker = pair
    error = {"event": "error", "call": "all_reduce", "exception": "RuntimeError"}
    send(worker, **error, message="tensors must be contiguous")
    link.read()
    assert link.lost is None

    send(worker, **error, message="[pair.cc:553] Connection closed by peer [::1]:7")
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
def test_a_message_to_a_worker_is_one_line_of_json(
    pair: tuple[Link, socket.socket],
    message: StopAtStepBoundary | PeerFailed | ShowStacks,
    line: dict[str, object],
) -> None:
    link, worker = pair

    link.send(message)

    sent = worker.recv(1 << 10)
    assert sent.endswith(b"\n")
    assert json.loads(sent) == line
