"""agent.output.folding: which tracebacks the console does not get."""

from __future__ import annotations

import pytest

from elaunch.agent.diagnosis.exit_status import shows_only_lost_peer
from elaunch.agent.output.folding import TracebackFold

HEAD = b"[rank0]: Traceback (most recent call last):\n"
FRAME = b'[rank0]:   File "train.py", line 7, in <module>\n[rank0]:     dist.all_reduce(x)\n'
LOST = b"[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:49831.\n"
OWN = b"[rank0]: ValueError: bad batch\n"
ALL = HEAD + FRAME + LOST


@pytest.fixture
def fold() -> TracebackFold:
    return TracebackFold(shows_only_lost_peer)


def test_a_traceback_that_tells_of_a_lost_peer_is_not_shown_if_the_worker_ends(fold: TracebackFold) -> None:
    shown = fold.take(b"step 3\n" + HEAD, 1.0) + fold.take(FRAME + LOST, 1.01)
    looked = fold.look(1.1)

    assert shown == b"step 3\n"
    assert looked == fold.end() == b""


def test_it_is_shown_if_the_program_goes_on(fold: TracebackFold) -> None:
    fold.take(ALL, 1.0)
    assert fold.look(1.1) == b""
    assert fold.due_s == 6.0

    assert fold.take(b"trying again\n", 3.0) == b""
    assert fold.look(6.0) == ALL + b"trying again\n"
    assert fold.take(b"step 4\n", 6.1) == b"step 4\n"
    assert fold.due_s is None


def test_any_other_traceback_is_shown_after_a_moment(fold: TracebackFold) -> None:
    assert fold.take(HEAD + FRAME + OWN, 1.0) == b""

    assert fold.due_s == 1.1
    assert fold.look(1.1) == HEAD + FRAME + OWN
    assert fold.due_s is None


def test_a_traceback_is_not_judged_before_its_last_line_is_there(fold: TracebackFold) -> None:
    fold.take(HEAD + FRAME, 1.0)
    early = fold.look(1.1)
    fold.take(LOST, 1.5)

    assert early == b""
    assert fold.look(1.6) == fold.end() == b""


def test_the_last_exception_of_a_chain_decides(fold: TracebackFold) -> None:
    chain = ALL + b"\nDuring handling of the above exception, another exception occurred:\n\n" + HEAD + FRAME + OWN
    fold.take(chain, 1.0)

    assert fold.end() == chain


def test_what_is_held_has_a_bound(fold: TracebackFold) -> None:
    fold.take(HEAD, 1.0)
    much = b"x" * 1023 + b"\n"

    shown = b"".join(fold.take(much, 1.0) for _ in range(300))

    assert shown.startswith(HEAD)
    assert len(shown) > 256 << 10
