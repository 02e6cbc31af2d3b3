"""agent.metrics.server: scrapes are answered, whoever else connects."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from elaunch.agent.metrics.collector import NodeState
from elaunch.agent.metrics.counters import RunCounters
from elaunch.agent.metrics.listener import listen, url
from elaunch.agent.metrics.server import serve
from tests.harness import DEADLINE_S, wait_for
from tests.unit.agent.driver import started


@pytest.fixture(scope="module")
def place() -> str:
    """The URL of the metrics of a node that runs. The server ends with this process."""
    listener, agent, counters = listen("127.0.0.1", 0), started().agent, RunCounters(0.0)
    serve(listener, lambda: NodeState(agent, counters.at(1.0), {0: 5, 2: 7}, 1.5, 1.7e9))
    return url(listener)


def get(place: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(place, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def test_a_scrape_has_the_state_of_the_node_with_its_job_and_host(place: str) -> None:
    text = get(place)

    own = '{node="node-a",run_id="job"'
    for sample in (
        'elaunch_step{node="node-a",rank="2",run_id="job"} 7.0',
        'elaunch_workers{node="node-a",run_id="job",state="running"} 3.0',
        f"elaunch_steps_per_second{own}}} 1.5",
        f"elaunch_leader{own}}} 1.0",
        f"elaunch_restarts_total{own}}} 0.0",
        f'elaunch_time_seconds_total{own},use="waiting"}} 1.0',
    ):
        assert sample in text.splitlines()


def test_connections_that_say_nothing_keep_no_scrape_from_its_answer(place: str) -> None:
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


def test_nothing_wakes_the_server_but_a_request(place: str) -> None:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "elaunch-metrics"]
    get(place)

    def switches() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[0])

    # The last request may still be on its way out.
    last = 0
    while last != (last := switches()):
        threading.Event().wait(0.3)
    before = last
    # Longer than the half second in which socketserver would look whether it is to end.
    threading.Event().wait(1.3)

    assert switches() - before <= 1


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", r"127\.0\.0\.1"), ("::1", r"\[::1\]")])
def test_the_url_can_be_pasted(host: str, shown: str) -> None:
    with listen(host, 0) as listener:
        assert re.fullmatch(rf"http://{shown}:\d+/metrics", url(listener))
