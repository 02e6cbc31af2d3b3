"""agent.diagnosis.flight_recorder: whatever a worker answers; tests/e2e/test_hangs.py has real ranks."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from elaunch.agent.diagnosis.flight_recorder import FlightRecorder

REST = b'"last_started_collective": -1, "last_completed_collective": 0}}}'


@pytest.mark.parametrize("answer", [b"x", b"n[]", b"n\xff", b"e", b"n" + b"9" * 60_000])
def test_an_answer_of_another_form_says_nothing(answer: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder = FlightRecorder(ours.detach())
    with theirs:
        assert recorder.poll(1.0) is None
        assert theirs.recv(32) == b"n"
        theirs.send(answer)
        theirs.send(b"n{}")

        assert not recorder.poll(2.0)
        assert not recorder.is_stalled(2.0)
        assert recorder.counts == {}
        theirs.close()
        assert recorder.poll(3.0) is None
    recorder.close()


def test_a_worker_that_floods_its_agent_is_read_in_order_and_only_in_part_at_each_look() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder = FlightRecorder(ours.detach())
    theirs.setblocking(False)
    sent, looked = 0, []
    with theirs:
        for now_s in range(4):
            with suppress(BlockingIOError):
                while True:
                    theirs.send(b'n{"pg_status": {"0": {"last_enqueued_collective": %d,' % sent + REST)
                    sent += 1
            looked.append(recorder.poll(float(now_s)))
    recorder.close()

    seen = [counts[0, 0].entered if counts else -1 for counts in looked]
    assert sent > 32, "the flood is longer than what a look reads"
    assert seen == [15, 31, 47, 63]
