"""agent.serve.metrics: what is counted of a node, and that scrapes are answered, whoever else connects."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request

import pytest

from elaunch.agent.serve.metrics import NodeState, RunCounters, listen, serve, url
from tests.harness import DEADLINE_S, wait_for
from tests.unit.agent.driver import started

FAILED = {"kind": "signal", "failed_at": 1700000000.5}


def counted(*events: tuple[float, str, dict[str, object]]) -> RunCounters:
    counters = RunCounters(100.0)
    for at_s, event, fields in events:
        counters.count(event, fields, 100.0 + at_s)
    return counters


def seconds(counters: RunCounters, now_s: float) -> dict[str, float]:
    return {use: spent for use, spent in counters.seconds(now_s).items() if spent}


def test_a_program_that_reports_no_steps_is_productive_from_its_start() -> None:
    counters = counted((2, "sealed", {}), (3, "forked", {"rank": 0}), (3.5, "forked", {"rank": 1}))

    assert seconds(counters, 113.0) == {"waiting": 2.0, "starting": 1.0, "productive": 10.0}


def test_a_restart_costs_the_stop_the_wait_and_the_start_up_to_the_first_step() -> None:
    counters = counted(
        (1, "sealed", {}),
        (2, "forked", {}),
        (4, "progress", {"steps": [0, 0], "first_steps": [0, 0]}),
        (14, "progress", {"steps": [9, 8]}),
        (20, "failed", FAILED),
        (21, "stopping", {}),
        (22, "stopped", {}),
        (22, "progress", {"steps": [12, 11]}),
        (23, "cleared", {}),
        (23, "cause", FAILED),
        (25, "sealed", {}),
        (26, "forked", {}),
        (31, "progress", {"steps": [10, 10], "first_steps": [10, 10]}),
    )

    spent = seconds(counters, 140.0)
    assert spent == {"waiting": 3.0, "starting": 7.0, "productive": 27.0, "stopping": 3.0}
    assert sum(spent.values()) == pytest.approx(40.0)
    # Steps 10, 11 and 12 had been complete.
    assert counters.steps_repeated == 3
    assert (counters.failures, counters.last_failure) == ({"signal": 1}, (1700000000.5, "signal"))


def test_a_hang_counts_once() -> None:
    assert counted((1, "seems_hung", {"message": "it waits"}), (2, "hung", {"quiet_s": 60})).hangs == 1


@pytest.fixture(scope="module")
def place() -> str:
    """The URL of the metrics of a node that runs. The server ends with this process."""
    listener, agent, counters = listen("127.0.0.1", 0), started().agent, RunCounters(0.0)
    serve(listener, lambda: NodeState(agent, counters, {0: 5, 2: 7}, 1.5, 1.7e9))
    return url(listener)


def get(place: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(place, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def test_idle_connections_keep_no_scrape_from_its_answer(place: str) -> None:
    port = int(re.findall(r":(\d+)/", place)[0])
    silent = [socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) for _ in range(40)]

    def threads() -> int:
        return sum("process_request_thread" in thread.name for thread in threading.enumerate())

    try:
        for connection in silent[-8:]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert all(connection.recv(1) == b"" for connection in silent[:-8])
        wait_for(lambda: threads() == 8, "the server holds as many as it takes")

        assert "elaunch_generation" in get(place)

        assert silent[-8].recv(1) == b"", "the oldest made room"
        # The socket of the oldest is closed before its thread has ended.
        wait_for(lambda: threads() <= 8, "the server holds no more than it takes")
    finally:
        for connection in silent:
            connection.close()
