"""The worker's end of the link never waits, never fails, and never sends half a line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elaunch.trainer import link
from tests.forked import Child
from tests.harness import DEADLINE_S, wait_for


@contextlib.contextmanager
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end of a link. The other end is in ELAUNCH_LINK, and can be inherited, as after a spawn."""
    ours, theirs = socket.socketpair()
    number = theirs.detach()
    os.set_inheritable(number, True)
    monkeypatch.setenv("ELAUNCH_LINK", str(number))
    link._open_link.cache_clear()
    with ours:
        yield ours
    ended = link._open_link()
    link._open_link.cache_clear()
    # The thread reads until the agent's end is closed. It must not be counted by the next test.
    if ended._thread is not None:
        ended._thread.join(DEADLINE_S)
        assert not ended._thread.is_alive()
    ended.close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with linked(monkeypatch) as ours:
        yield ours


def received(agent: socket.socket) -> bytes:
    agent.setblocking(False)
    parts = []
    try:
        while part := agent.recv(1 << 20):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def test_a_step_is_one_json_line_and_the_first_one_has_the_time_it_was_complete(agent: socket.socket) -> None:
    line = link._open_link()
    line.send_step(7, now_s=1.5)
    line.send_step(8, now_s=2.5)
    line.send_step(9, now_s=3.5, total=400)

    first, second, third = received(agent).splitlines(keepends=True)
    assert first == b'{"event": "progress", "step": 7, "monotonic_s": 1.5}\n'
    assert second == b'{"event": "progress", "step": 8}\n'
    assert third == b'{"event": "progress", "step": 9, "total": 400}\n'


def test_the_last_step_is_reported_at_the_programs_end_if_it_was_left_out(agent: socket.socket) -> None:
    for step in (1, 2, 3):
        link.report(step)

    for _ in range(2):
        link._open_link().send_last_step()

    assert [json.loads(line)["step"] for line in received(agent).splitlines()] == [1, 3]


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
    for step in range(20_000):
        line.send_step(step, now_s=float(step))
    first = received(agent)
    line.send_step(20_000, now_s=20_000.0)

    rows = [json.loads(row) for row in (first + received(agent)).splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps)
    assert len(steps) < 20_000
    assert steps[-1] == 20_000


def test_a_line_that_fitted_in_part_is_finished_before_the_next() -> None:
    class Narrow:
        """A socket that takes 10 bytes at a time, and nothing while it is blocked."""

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

    def reports() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        link.report(2)

    with Child(reports) as child:
        assert child.end() == 0
    assert received(agent).count(b"\n") == 1


# --- what must arrive, and what is received


def messages(agent: socket.socket) -> list[dict[str, object]]:
    return [json.loads(row) for row in received(agent).splitlines()]


def test_a_mark_has_the_time_on_the_clock_that_all_processes_of_a_host_share(agent: socket.socket) -> None:
    before_s = time.monotonic()
    link.mark("x" * 1000)

    (message,) = messages(agent)
    assert (message["event"], message["name"]) == ("mark", "x" * 100)
    assert before_s - 1e-3 <= message["monotonic_s"] <= time.monotonic() + 1e-3  # type: ignore[operator]


def test_phases_and_ends_are_json_lines_too(agent: socket.socket) -> None:
    link.phase("x" * 1000)
    link.saving(2)
    link.saved(3)
    link.stopped(4)
    link.refuse("y" * 3000)

    assert messages(agent) == [
        {"event": "phase", "name": "x" * 100},
        {"event": "saving", "step": 2},
        {"event": "saved", "step": 3},
        {"event": "stopped", "step": 4},
        {"event": "refused", "reason": "y" * 2000},
    ]


@pytest.mark.parametrize("log", [link.saved, link.stopped])
def test_what_must_arrive_waits_for_an_agent_that_makes_room(
    agent: socket.socket, log: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = link._open_link()
    monkeypatch.setattr(link, "_SURELY_S", DEADLINE_S)
    for step in range(20_000):
        line.send_step(step, now_s=float(step))
    waiting = threading.Thread(target=log, args=(7,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "the socket was not full"

    rows = messages(agent)
    waiting.join(DEADLINE_S)
    rows += messages(agent)

    assert not waiting.is_alive()
    assert rows[-1]["step"] == 7
    assert [row["event"] for row in rows[:-1]] == ["progress"] * (len(rows) - 1)


def send(agent: socket.socket, **message: object) -> None:
    agent.sendall(json.dumps(message).encode() + b"\n")


def test_a_listener_reports_its_messages_and_receives_them_in_a_thread(agent: socket.socket) -> None:
    calls: queue.SimpleQueue[tuple[object, str]] = queue.SimpleQueue()
    link.listen(
        on_stop=lambda reason: calls.put((reason, threading.current_thread().name)),
        on_peer_failed=lambda generation: calls.put((generation, threading.current_thread().name)),
    )

    send(agent, event="stop_at_step_boundary", reason="leave")
    send(agent, event="peer_failed", generation=3)

    assert calls.get(timeout=DEADLINE_S) == ("leave", "elaunch-link")
    assert calls.get(timeout=DEADLINE_S) == (3, "elaunch-link")
    assert messages(agent) == [{"event": "listens", "stop": True, "peer_failed": True}]


@pytest.mark.parametrize(
    "noise", [b"\xff\n", b"[]\n", b"{}\n", b'{"event": "peer_failed"}\n', b'{"event": "of tomorrow"}\n']
)
def test_an_unknown_message_is_ignored(agent: socket.socket, noise: bytes) -> None:
    calls: queue.SimpleQueue[object] = queue.SimpleQueue()
    link.listen(on_peer_failed=calls.put)

    agent.sendall(noise)
    send(agent, event="peer_failed", generation=1)

    assert calls.get(timeout=DEADLINE_S) == 1


# --- several that listen, and those that do so no more


def after_a_failure(agent: socket.socket) -> list[dict[str, object]]:
    """Notify the worker of a failure. Returns its messages up to the call of the last listener."""
    calls: queue.SimpleQueue[object] = queue.SimpleQueue()
    last = link.listen(on_stop=calls.put)
    send(agent, event="peer_failed", generation=0)
    send(agent, event="stop_at_step_boundary", reason="leave")
    calls.get(timeout=DEADLINE_S)
    last.close()
    return [row for row in messages(agent) if row["event"] != "listens"]


def test_saved_is_reported_once_and_only_after_the_last_rescue(agent: socket.socket) -> None:
    before: list[object] = []

    def slow_one(generation: int) -> int:
        before.append([row for row in messages(agent) if row["event"] == "saved"])
        return 5

    link.listen(rescue=lambda _: 7)
    link.listen(rescue=slow_one)

    assert after_a_failure(agent) == [{"event": "saved", "step": 5}]
    assert before == [[]]


def test_a_script_that_has_saved_waits_for_the_rescues_and_reports_it_again_then(agent: socket.socket) -> None:
    calls: list[str] = []

    def rescue(generation: int) -> int:
        calls.append("rescue")
        # The script may call this from any of its threads, which knows nothing of the other rescues.
        link.saved(1)
        return 7

    def save(generation: int) -> None:
        calls.append("save")
        link.saved(2)

    link.listen(on_peer_failed=save)
    link.listen(rescue=rescue)

    assert after_a_failure(agent) == [{"event": "saved", "step": 2}]
    assert calls == ["rescue", "save"]


def test_a_rescue_that_fails_keeps_neither_another_nor_the_agent_from_going_on(
    agent: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    rescued: list[int] = []

    def fail(generation: int) -> int:
        raise ValueError("raised by the test")

    def rescue(generation: int) -> int:
        rescued.append(generation)
        return 7

    link.listen(rescue=fail)
    link.listen(rescue=rescue)

    # The agent does not wait for the failed rescue, which keeps nothing.
    assert after_a_failure(agent) == [{"event": "saved", "step": 0}]
    assert rescued == [0]
    assert "raised by the test" in capsys.readouterr().err


def test_who_closes_is_called_no_more_and_the_agent_knows_what_is_left(agent: socket.socket) -> None:
    stays = link.listen(on_stop=print)
    with link.listen(rescue=lambda _: 7) as goes:
        assert messages(agent)[-1] == {"event": "listens", "stop": True, "peer_failed": True}
    assert messages(agent)[-1] == {"event": "listens", "stop": True, "peer_failed": False}
    goes.close()
    stays.close()
    assert messages(agent) == [{"event": "listens", "stop": False, "peer_failed": False}]

    # The worker reports this before the agent knows of a failure.
    link.report(9)
    assert after_a_failure(agent)[-1] == {"event": "saved", "step": 9}


def test_a_dropped_listener_is_not_called_and_the_agent_is_notified_when_it_requests_a_stop(
    agent: socket.socket,
) -> None:
    listener = link.listen(on_stop=print, rescue=lambda _: 7)
    link.report(9)
    received(agent)

    listener.drop()
    listener.close()
    assert messages(agent) == []
    send(agent, event="peer_failed", generation=0)
    send(agent, event="stop_at_step_boundary", reason="leave")

    rows: list[dict[str, object]] = []
    wait_for(lambda: rows.extend(messages(agent)) or len(rows) == 2, "two messages")
    assert rows == [{"event": "saved", "step": 9}, {"event": "listens", "stop": False, "peer_failed": False}]


def test_the_stacks_of_all_threads_go_to_stderr(agent: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    calls: queue.SimpleQueue[object] = queue.SimpleQueue()
    link.listen(on_peer_failed=calls.put)

    send(agent, event="stacks")
    send(agent, event="peer_failed", generation=1)
    calls.get(timeout=DEADLINE_S)

    err = capfd.readouterr().err
    assert "elaunch: what this worker's threads are doing" in err
    assert "test_the_stacks_of_all_threads_go_to_stderr" in err
    assert "in _receive" not in err, "the thread that listens is elaunch's own"


def test_a_child_forked_while_another_thread_has_something_to_send_has_no_link(agent: socket.socket) -> None:
    line = link._open_link()

    def has_something_to_send() -> None:
        # No thread in the child would ever release the other thread's lock.
        assert line._lock.acquire(blocking=False)
        line._lock.release()
        link.saved(1)

    with line._lock:
        child = Child(has_something_to_send)

    with child:
        assert child.end() == 0
    assert received(agent) == b""


# --- should_stop, without a process group


def test_without_a_process_group_a_process_stops_when_its_own_agent_requests_it(agent: socket.socket) -> None:
    link._boundary.cache_clear()
    link.report(11)
    before = link.should_stop()

    send(agent, event="stop_at_step_boundary", reason="leave")

    assert not before
    wait_for(link.should_stop, "the request")
    assert link.should_stop()
    assert [row for row in messages(agent) if row["event"] != "progress"] == [
        {"event": "listens", "stop": True, "peer_failed": False},
        {"event": "stopped", "step": 11},
    ]
    link._boundary.cache_clear()


def test_a_process_that_checks_at_every_third_call_stops_only_then(agent: socket.socket) -> None:
    boundary = link._Boundary()
    boundary._request("leave")

    assert [boundary.should_stop(3) for _ in range(5)] == [False, False, True, True, True]
