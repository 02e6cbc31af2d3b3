"""An agent's side of warm fork servers."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.warm import client
from tests.harness import joined


@pytest.fixture
def forked() -> Iterator[tuple[int, int]]:
    """The pid of a process that stands for a fork, and a pidfd for it."""
    with subprocess.Popen(["sleep", "60"]) as process:
        pidfd = os.pidfd_open(process.pid)
        yield process.pid, pidfd
        os.close(pidfd)
        process.kill()


def test_a_fork_may_take_longer_for_its_checks_than_the_server_for_its_answer(
    forked: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.1)
    ours, theirs = wire.pair()
    with ours, theirs:
        wire.send(theirs, {"event": "forked", "pid": forked[0]}, (forked[1],))
        answer = {"event": "warm", "since": 1.0, "server": 1}
        timer = threading.Timer(0.3, wire.send, (theirs, answer))
        timer.start()

        borrowed = client._answered(ours)
        joined(timer)
        borrowed.kill()

        assert borrowed.pid == forked[0]


def test_a_fork_that_says_nothing_is_ended_in_time(forked: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.1)
    monkeypatch.setattr(client, "_CHECKS_S", 0.1)
    ours, theirs = wire.pair()
    began_s = time.monotonic()
    with ours, theirs:
        wire.send(theirs, {"event": "forked", "pid": forked[0]}, (forked[1],))

        with pytest.raises(client.Cold, match="does not answer"):
            client._answered(ours)

    assert time.monotonic() - began_s < 60
    assert os.waitid(os.P_PID, forked[0], os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
