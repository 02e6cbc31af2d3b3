"""agent.output.folding: which tracebacks the console does not get."""

from __future__ import annotations

import pytest

from elaunch.agent.diagnosis.exit_status import tells_of_lost_peer
from elaunch.agent.output.folding import ShownTracebacks, TracebackFold, said_of_folded

HEAD = b"[rank0]: Traceback (most recent call last):\n"
FRAME = b'[rank0]:   File "train.py", line 7, in <module>\n[rank0]:     dist.all_reduce(x)\n'
LOST = b"[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:49831.\n"
OWN = b"[rank0]: ValueError: bad batch\n"
ALL = HEAD + FRAME + LOST


@pytest.fixture
def fold() -> TracebackFold:
    return TracebackFold(tells_of_lost_peer)


def test_a_traceback_that_tells_of_a_lost_peer_is_not_shown_if_the_worker_ends(fold: TracebackFold) -> None:
    shown = fold.take(b"step 3\n" + HEAD, 1.0) + fold.take(FRAME + LOST, 1.01)
    looked = fold.look(1.1)

    assert shown == b"step 3\n"
    assert looked == fold.end() == b""
    assert fold.folded == 4


def test_it_is_shown_if_the_program_goes_on(fold: TracebackFold) -> None:
    fold.take(ALL, 1.0)
    assert fold.look(1.1) == b""
    assert fold.due_s == 6.0

    assert fold.take(b"trying again\n", 3.0) == b""
    assert fold.look(6.0) == ALL + b"trying again\n"
    assert fold.take(b"step 4\n", 6.1) == b"step 4\n"
    assert (fold.folded, fold.due_s) == (0, None)


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
    assert fold.folded == 4


def test_one_that_stays_torn_is_shown(fold: TracebackFold) -> None:
    fold.take(HEAD, 1.0)

    assert fold.look(2.0) == HEAD


def test_the_last_exception_of_a_chain_decides(fold: TracebackFold) -> None:
    chain = ALL + b"\nDuring handling of the above exception, another exception occurred:\n\n" + HEAD + FRAME + OWN
    fold.take(chain, 1.0)

    assert fold.end() == chain
    assert fold.folded == 0


@pytest.mark.parametrize("between", [b"", b"\nDuring handling of the above exception, another exception occurred:\n\n"])
def test_an_error_of_its_own_before_the_lost_peer_is_shown(fold: TracebackFold, between: bytes) -> None:
    both = HEAD + FRAME + OWN + between + ALL
    fold.take(both, 1.0)

    assert fold.end() == both
    assert fold.folded == 0


def test_two_tracebacks_of_lost_peers_are_not_shown(fold: TracebackFold) -> None:
    fold.take(ALL + b"\nDuring handling of the above exception, another exception occurred:\n\n" + ALL, 1.0)

    assert fold.end() == b""


def test_what_is_held_has_a_bound(fold: TracebackFold) -> None:
    fold.take(HEAD, 1.0)
    much = b"x" * 1023 + b"\n"

    shown = b"".join(fold.take(much, 1.0) for _ in range(300))

    assert shown.startswith(HEAD)
    assert len(shown) > 256 << 10


def test_output_without_a_traceback_passes_at_once(fold: TracebackFold) -> None:
    assert fold.take(b"loss 0.3\n", 1.0) == b"loss 0.3\n"
    assert fold.due_s is None
    assert fold.end() == b""


JOINED = b"\nDuring handling of the above exception, another exception occurred:\n\n"
INTERRUPTED = HEAD + FRAME + b"[rank0]: KeyboardInterrupt\n"
PLAIN = b'Traceback (most recent call last):\n  File "t.py", line 7, in <module>\n    f()\n    ~^^\nKeyboardInterrupt\n'


@pytest.fixture
def interrupted() -> TracebackFold:
    return TracebackFold(tells_of_lost_peer, lambda: True)


@pytest.mark.parametrize(
    "traceback",
    [INTERRUPTED, PLAIN, PLAIN + JOINED + PLAIN, INTERRUPTED + JOINED + ALL, ALL + JOINED + PLAIN],
    ids=["rank", "plain", "twice", "then a lost peer", "after a lost peer"],
)
def test_after_ctrl_c_a_rank_that_ends_by_it_shows_no_traceback(interrupted: TracebackFold, traceback: bytes) -> None:
    shown = interrupted.take(b"step 3\n" + traceback, 1.0) + interrupted.look(1.1) + interrupted.end()

    assert shown == b"step 3\n"
    assert interrupted.folded == traceback.count(b"\n")


def test_what_a_rank_says_after_its_interrupt_is_shown(interrupted: TracebackFold) -> None:
    interrupted.take(PLAIN + b"saved step 7\n", 1.0)

    assert interrupted.look(1.1) == b""
    assert interrupted.end() == b"saved step 7\n"
    assert interrupted.folded == PLAIN.count(b"\n")


def test_an_error_that_comes_of_the_interrupt_is_shown(interrupted: TracebackFold) -> None:
    interrupted.take(PLAIN + JOINED + HEAD + FRAME + OWN, 1.0)

    assert interrupted.look(1.1).endswith(JOINED + HEAD + FRAME + OWN)


def test_an_interrupt_is_shown_if_the_program_goes_on(interrupted: TracebackFold) -> None:
    interrupted.take(PLAIN, 1.0)

    assert interrupted.look(1.1) == b""
    assert interrupted.look(6.0) == PLAIN


def test_an_interrupt_that_nobody_sent_is_shown(fold: TracebackFold) -> None:
    fold.take(PLAIN, 1.0)

    assert fold.look(1.1) + fold.end() == PLAIN
    assert fold.folded == 0


@pytest.mark.parametrize(
    ("lines", "is_interrupted", "said"),
    [
        ({1: 9}, False, "rank 1 lost a peer and ended; its traceback (9 lines) is not shown"),
        ({1: 9}, True, "rank 1 was interrupted and ended; its traceback (9 lines) is not shown"),
        ({1: 9, 0: 3}, True, "ranks 0 and 1 were interrupted and ended; their tracebacks (12 lines) are not shown"),
    ],
)
def test_one_line_says_whose_tracebacks_are_not_shown(lines: dict[int, int], is_interrupted: bool, said: str) -> None:
    assert said_of_folded(lines, is_interrupted=is_interrupted).startswith(f"{said} (-v")


@pytest.fixture
def shown() -> ShownTracebacks:
    """The tracebacks of a console on which nothing else is written."""
    return ShownTracebacks(lambda: 0)


def bare(text: bytes) -> bytes:
    return text.replace(b"[rank0]: ", b"")


GROUP = b"""  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 7, in <module>
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +------------------------------------
"""
LOADER = (
    bare(HEAD + FRAME)
    + b"RuntimeError: Caught ValueError in DataLoader worker process 0.\nOriginal "
    + bare(HEAD + FRAME + OWN)
)
UNCOMPILED = b'  File "/tmp/train.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
LINES = b"[rank0]: RuntimeError: CUDA error: an illegal memory access\n[rank0]: CUDA errors may come later\n"


@pytest.mark.parametrize(
    "traceback",
    [
        HEAD + FRAME + OWN,
        bare(HEAD + FRAME + OWN),
        bare(ALL + JOINED + HEAD + FRAME + OWN),
        GROUP,
        LOADER,
        HEAD + FRAME + LINES,
        UNCOMPILED,
    ],
    ids=["torch's", "Python's", "chain", "group", "data loader", "lines", "no frame"],
)
def test_a_traceback_that_the_console_has_is_a_line(shown: ShownTracebacks, traceback: bytes) -> None:
    before, after, line = b"step 3\n", b"bye\n", b"elaunch: rank 0: the same traceback as rank 1\n"
    of_other = traceback.replace(b"[rank0]", b"[rank1]")

    assert shown.once(before + traceback + after, 0, 1) == before + traceback + after
    assert shown.once(traceback, 0, 1) == b"elaunch: rank 1: the same traceback as before\n"
    assert shown.once(traceback, 0, 1, is_alone=True) == traceback
    assert shown.once(before + of_other + after, 0, 0) == before + line + after
    assert shown.once(traceback, 1, 1) == b"elaunch: rank 1: the same traceback as in generation 0\n"
    assert shown.once(traceback.rstrip(), 2, 0) == b"elaunch: rank 0: the same traceback as rank 1 in generation 0\n"


def test_of_a_traceback_that_ends_otherwise_the_end_is_shown(shown: ShownTracebacks) -> None:
    shown.once(HEAD + FRAME + OWN, 0, 1)

    assert shown.once(HEAD + FRAME + b"[rank0]: ValueError: bad shard 3\n", 0, 0) == (
        b"elaunch: rank 0: the same stack as rank 1, but:\n[rank0]: ValueError: bad shard 3\n"
    )
    other = HEAD + FRAME.replace(b"line 7", b"line 8") + OWN
    assert shown.once(other, 0, 0) == other


@pytest.mark.parametrize("traceback", [HEAD + FRAME + OWN, UNCOMPILED], ids=["frames", "no frame"])
def test_the_fold_shows_a_traceback_once(shown: ShownTracebacks, traceback: bytes) -> None:
    def of(rank: int) -> TracebackFold:
        return TracebackFold(tells_of_lost_peer, once=lambda text: shown.once(text, 0, rank))

    one, other = of(0), of(1)
    one.take(traceback, 1.0)
    *begin, raised = traceback.splitlines(keepends=True)
    other.take(b"loss 0.3\n" + b"".join(begin), 1.0)
    other.take(raised, 1.01)

    assert one.look(1.1) == traceback
    assert other.end() == b"elaunch: rank 1: the same traceback as rank 0\n"
    assert (one.folded, other.folded) == (0, 0)


def test_a_traceback_is_near_while_few_lines_were_written_since() -> None:
    lines = 100
    console = ShownTracebacks(lambda: lines)
    text = bare(HEAD + FRAME + OWN)
    console.once(HEAD + FRAME + OWN, 2, 5)

    assert console.near(text.decode()) == "printed above by rank 5 in generation 2"
    shard = text.decode().replace("bad batch", "bad shard")
    assert console.near(shard) == "the stack is printed above by rank 5 in generation 2"
    for other in ("", "x\n  y"):
        assert console.near(other) == ""
    lines += 1000
    assert console.near(text.decode()) == ""


def test_tracebacks_that_are_remembered_have_a_bound(shown: ShownTracebacks) -> None:
    texts = [HEAD + FRAME.replace(b"line 7", b"line %d" % line) + OWN for line in range(1000)]
    for text in texts:
        shown.once(text, 0, 0)

    assert shown.once(texts[-1], 1, 0) != texts[-1]
    assert shown.once(texts[0], 1, 0) == texts[0]


def test_the_begin_of_a_traceback_of_a_worker_that_is_stopped_meanwhile_is_a_line_too(shown: ShownTracebacks) -> None:
    shown.once(HEAD + FRAME + FRAME + OWN, 0, 1)

    assert shown.once(HEAD + FRAME[:-20], 0, 0) == b"elaunch: rank 0: the same traceback as rank 1\n"
    assert shown.once(HEAD + FRAME + OWN, 0, 0) == HEAD + FRAME + OWN
