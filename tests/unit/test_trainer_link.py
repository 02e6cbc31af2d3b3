"""The worker's line to its agent never waits, never fails, never sends half a line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.trainer import link


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end; the other is in ELAUNCH_LINK, inheritable as after a spawn."""
    ours, theirs = socket.socketpair()
    number = theirs.detach()
    os.set_inheritable(number, True)
    monkeypatch.setenv("ELAUNCH_LINK", str(number))
    link._open_link.cache_clear()
    with ours:
        yield ours
    link._open_link().close()
    link._open_link.cache_clear()


def received(agent: socket.socket) -> bytes:
    agent.setblocking(False)
    parts = []
    try:
        while part := agent.recv(1 << 20):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def test_a_step_is_one_json_line(agent: socket.socket) -> None:
    link.report(7)

    assert received(agent) == b'{"event": "progress", "step": 7}\n'


def test_steps_that_follow_closely_are_left_out_and_later_ones_are_said(agent: socket.socket) -> None:
    line = link._open_link()
    for step in range(1000):
        line.send_step(step, now_s=100 + step / 1000)

    said = [json.loads(row)["step"] for row in received(agent).splitlines()]
    assert said[0] == 0
    assert 15 <= len(said) <= 20
    assert said[-1] >= 940


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELAUNCH_LINK", raising=False)
    link._open_link.cache_clear()

    link.report(1)


@pytest.mark.parametrize("number", ["", "x", "-1", "99999"])
def test_a_number_that_is_no_socket_is_ignored(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("ELAUNCH_LINK", number)
    link._open_link.cache_clear()

    link.report(1)


def test_a_file_or_a_network_socket_under_that_number_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("rb") as file, socket.socket(socket.AF_INET) as network:
        for number in (file.fileno(), network.fileno()):
            monkeypatch.setenv("ELAUNCH_LINK", str(number))
            link._open_link.cache_clear()
            link.report(1)
            os.fstat(number)


def test_a_full_socket_drops_whole_lines_and_never_waits(agent: socket.socket) -> None:
    line = link._open_link()
    for step in range(50_000):
        line.send_step(step, now_s=float(step))
    first = received(agent)
    line.send_step(50_000, now_s=50_000.0)

    rows = [json.loads(row) for row in (first + received(agent)).splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps)
    assert len(steps) < 50_000
    assert steps[-1] == 50_000


def test_a_line_that_fitted_in_part_is_finished_before_the_next() -> None:
    class Narrow:
        """Takes 10 bytes at a time, and nothing when blocked."""

        def __init__(self) -> None:
            self.taken, self.blocked = b"", False

        def send(self, content: bytes, flags: int) -> int:
            if self.blocked:
                raise BlockingIOError
            self.taken += content[:10]
            return len(content[:10])

    end = Narrow()
    line = link._Link(end)  # type: ignore[arg-type]
    line.send(b"first line is long\n")
    end.blocked = True
    line.send(b"dropped\n")
    end.blocked = False
    line.send(b"second\n")

    assert end.taken == b"first line is long\nsecond\n"


def test_a_closed_agent_is_no_error(agent: socket.socket) -> None:
    link.report(1)
    agent.close()

    link.report(2)
    link.report(3)


def test_the_socket_is_closed_on_exec_and_in_forked_children(agent: socket.socket) -> None:
    number = int(os.environ["ELAUNCH_LINK"])
    link.report(1)

    assert not os.get_inheritable(number)
    assert "ELAUNCH_LINK" not in os.environ
    child = os.fork()
    if child == 0:
        try:
            os.fstat(number)
        except OSError:
            link.report(2)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert received(agent).count(b"\n") == 1
