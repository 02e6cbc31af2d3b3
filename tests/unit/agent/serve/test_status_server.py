"""agent.serve.status_server: a query gets a response and decides nothing; no client can hold or fill the socket."""

from __future__ import annotations

import os
import selectors
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elaunch.agent.core.membership import OrderResponse
from elaunch.agent.core.state import Running, Stopping
from elaunch.agent.core.timeline import WorkersSeen
from elaunch.agent.linux import credentials
from elaunch.agent.serve.status_server import (
    LOCAL_BURST,
    LOCAL_PER_S,
    STORE_PAUSE_S,
    Allowance,
    LocalSocket,
    QueryQueue,
    StatusServer,
)
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules.queries import Query, Topic, post_query
from elaunch.rendezvous.rules.reports import RankReport, read_node_report
from elaunch.rendezvous.store import LeaseGone, Put, Txn
from tests.harness import DEADLINE_S, RUN_LIMIT_S, joined, wait_for
from tests.unit.agent.driver import KEYS, Driver, pair, started

NOBODY = 65534
QUERY = Query("0123456789abcdef", Topic.STATUS, 4711)
SEEN = WorkersSeen(0, 1.0, tuple(RankReport(local, local, -1, step=3) for local in range(3)))


def ask(driver: Driver, query: Query = QUERY) -> None:
    """Post a query in the driver's store, and sync its agent."""
    driver.store.grant(query.lease, 100)
    assert driver.store.commit(post_query(KEYS, query)).held
    driver.sync()


def answers_of(driver: Driver, offered: list[Txn], way: str = "") -> StatusServer:
    def offer(txn: Txn, held: Callable[[], object] | None) -> None:
        offered.append(txn)
        with suppress(LeaseGone):
            if held and driver.store.commit(txn).held:
                held()

    return StatusServer(lambda: driver.agent, lambda now_s: SEEN, offer, way, time.monotonic(), driver.happen)


def when_due(answers: StatusServer) -> None:
    due_s = wait_for(lambda: answers.due_s, "an answer is due")
    answers.tick(due_s)


def test_a_question_gets_this_nodes_report_on_the_askers_lease_once() -> None:
    driver, offered = started(), list[Txn]()
    answers = answers_of(driver, offered)
    ask(driver)

    answers.note(driver.agent.snapshot.query)
    when_due(answers)
    answers.note(driver.agent.snapshot.query)
    answers.tick(time.monotonic() + 100)

    (txn,) = offered
    (put,) = txn.then
    assert isinstance(put, Put)
    assert (put.key, put.lease) == (KEYS.responses(QUERY.identity, driver.node_id), 4711)
    report = read_node_report(put.value, driver.node_id)
    assert report is not None
    assert [rank.step for rank in report.ranks] == [3, 3, 3]
    assert driver.store.commit(txn).held
    assert answers.due_s is None


def test_the_locator_of_the_store_is_given_only_where_there_is_one() -> None:
    driver, way = started(), '{"token":"t"}'
    answers: list[str] = []

    def reply(text: str) -> bool:
        answers.append(text)
        return True

    answers_of(driver, [], way).handle("store", reply)
    answers_of(driver, []).handle("store", reply)
    answers_of(driver, [], way).handle("shutdown", reply)

    with_store, alone, unknown = answers
    assert with_store == '{"version":1,"store":{"token":"t"}}'
    assert "error" in alone
    assert "error" in unknown
    assert "token" not in encode(driver.agent.me) + alone + unknown


def test_an_order_is_obeyed_by_the_leader_alone_and_answered_first() -> None:
    leader, other = pair()
    query = Query("e" * 16, Topic.STOP, 4713)
    offered: list[Txn] = []
    ask(leader, query)
    for driver in (other, leader):
        answers = answers_of(driver, offered)
        answers.note(query)
        when_due(answers)

    assert isinstance(other.agent.phase, Running)
    assert isinstance(leader.agent.phase, Stopping)
    (txn,) = offered
    (put,) = txn.then
    assert isinstance(put, Put)
    assert decode(OrderResponse, put.value).is_done


def query(number: int) -> Query:
    return Query(f"{number:016x}", Topic.STATUS, 1 + number)


def test_a_burst_of_local_questions_is_answered_up_to_the_limit_and_then_at_the_rate() -> None:
    allowance, answered = Allowance(at_s=100.0), 0

    for number in range(2000):
        # Two seconds of a thousand questions each.
        allowance, is_answered = allowance.take(100.0 + number / 1000)
        answered += is_answered

    assert answered == pytest.approx(LOCAL_BURST + 2 * LOCAL_PER_S, abs=1)


def test_a_burst_of_questions_in_the_store_gets_an_answer_now_and_then_and_the_newest_wins() -> None:
    queue, answered = QueryQueue(), []

    for number in range(1000):
        now_s = 100.0 + number / 200
        queue = queue.after(query(number), now_s, 2, 0.0)
        queue, due = queue.take_due(now_s)
        answered += [(now_s, due)] if due else []

    assert len(answered) == pytest.approx(5 / STORE_PAUSE_S, abs=1)
    assert queue.waiting == query(999)
    assert queue.due_s is not None


class Desk:
    """A loop with the socket in it, in a thread; every request is answered with `text`."""

    def __init__(self, folder: Path, text: str = "{}") -> None:
        self.selector = selectors.DefaultSelector()
        self.topics: list[str] = []
        self.text = text
        folder.mkdir(mode=0o700)
        self.socket = LocalSocket([folder], self.selector, self._received)
        self._end_r, self._end_w = os.pipe()
        self.selector.register(self._end_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        os.write(self._end_w, b"x")
        joined(self._thread)
        self.socket.close()
        os.close(self._end_r)
        os.close(self._end_w)

    @property
    def path(self) -> str:
        assert self.socket.path
        return str(self.socket.path)

    def connected(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(DEADLINE_S)
        made.connect(self.path)
        return made

    def response(self, request: bytes) -> bytes:
        with self.connected() as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    def _received(self, topic: str, reply: Callable[[str], bool]) -> None:
        self.topics.append(topic)
        reply(self.text)

    def _run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fd == self._end_r:
                    return
                key.data()


@contextmanager
def desk(folder: Path, text: str = "{}") -> Iterator[Desk]:
    made = Desk(folder, text)
    try:
        yield made
    finally:
        made.close()


def test_a_line_is_answered_by_a_line_and_nothing_stays(tmp_path: Path) -> None:
    with desk(tmp_path / "private", '{"version":1}') as open_desk:
        assert stat.S_IMODE(Path(open_desk.path).stat().st_mode) == 0o600
        assert open_desk.response(b'{"ask":"status"}\n') == b'{"version":1}\n'
        assert open_desk.topics == ["status"]

    assert not (tmp_path / "private").exists()


@pytest.mark.parametrize(
    "request_",
    [b"\n", b"garbage\n", b'{"ask":7}\n', b"[" * 5000, b'{"ask":"status"}' + b" " * 9000, b"\xff\xfe\n", b""],
)
def test_what_is_no_request_is_let_go_of_without_an_answer(tmp_path: Path, request_: bytes) -> None:
    with desk(tmp_path / "private") as open_desk:
        with open_desk.connected() as connection:
            connection.sendall(request_)
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert connection.recv(100) == b""

        assert open_desk.topics == []
        assert open_desk.response(b'{"ask":"status"}\n') == b"{}\n"


def test_idle_connections_keep_no_client_out(tmp_path: Path) -> None:
    with desk(tmp_path / "private") as open_desk:
        idle = [open_desk.connected() for _ in range(30)]
        for number, connection in enumerate(idle):
            # The oldest ones are let go of by now.
            with suppress(BrokenPipeError):
                connection.sendall(b"{" if number % 2 else b"\xf0")

        assert open_desk.response(b'{"ask":"status"}\n') == b"{}\n"
        for connection in idle:
            connection.close()


def test_each_end_knows_the_other_by_the_kernels_credentials(tmp_path: Path) -> None:
    with desk(tmp_path / "private") as open_desk, open_desk.connected() as connection:
        assert credentials(connection) == (os.getpid(), os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_another_user_gets_nothing_even_if_somebody_opened_the_folder(mode: int) -> None:
    # What pytest makes is closed to others.
    folder = Path(f"/tmp/elaunch-test-{os.getpid()}")
    try:
        with desk(folder) as open_desk:
            folder.chmod(mode)
            Path(open_desk.path).chmod(0o600 if mode == 0o700 else 0o666)
            ask = (
                "import os, socket, sys\n"
                f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
                f"s = socket.socket(socket.AF_UNIX); s.settimeout({DEADLINE_S})\n"
                "try:\n"
                f'    s.connect({open_desk.path!r}); s.sendall(b\'{{"ask":"status"}}\\n\'); print(s.recv(100))\n'
                "except OSError as error: print(type(error).__name__)\n"
            )

            response = subprocess.run(
                [sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=RUN_LIMIT_S
            ).stdout

            assert response.strip() in (
                ("PermissionError",) if mode == 0o700 else ("b''", "ConnectionResetError", "BrokenPipeError")
            )
            assert open_desk.topics == []
            assert open_desk.response(b'{"ask":"status"}\n') == b"{}\n"
    finally:
        if folder.exists():
            folder.rmdir()
