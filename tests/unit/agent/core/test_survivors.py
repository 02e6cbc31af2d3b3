"""agent.core.survivors: who waits in vain, by a table of what it may do besides."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elaunch.agent.core import survivors
from elaunch.agent.core.collectives import Count
from elaunch.agent.core.stack_groups import Frame
from elaunch.agent.core.survivors import (
    STUCK_S,
    Inside,
    Outside,
    Stillness,
    SurvivorLook,
    after,
    is_stuck,
    read_inside,
    waits_in_vain,
)

WORLD_SIZE = 3
PID = 100
PYTHON, SITE = "/usr/lib/python3.11", "/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"


def frame(function: str, file: str) -> Frame:
    return Frame(function, file, 0)


WAITS = (frame("wait", f"{PYTHON}/threading.py"), frame("wait", f"{PYTHON}/threading.py"))
BEGINS = (frame("run", f"{PYTHON}/threading.py"), frame("_bootstrap", f"{PYTHON}/threading.py"))
INSIDE = Inside(
    at=(7, 24),
    main=frame("broadcast", C10D),
    others=(),
    answers=102,
    loops=frozenset({101}),
    tracker=202,
    ranks=WORLD_SIZE,
    timeout_s=1800.0,
    counts={(0, 0): Count(6, -1, 5), (0, 1): Count(4, -1, 4), (0, 2): Count(-1, -1, -1)},
)
OUTSIDE = Outside(
    main=PID,
    calls={PID: ("futex", "0x1 0x2"), 101: ("epoll_wait", "0x3"), 102: ("recvfrom", "0x5"), 104: ("futex", "0x4")},
    children={201: "pt_data_worker", 202: "python"},
    written_bytes=500,
    cpu_s=3.14,
)
LOOK = SurvivorLook(INSIDE, OUTSIDE)


def inside(**changes: Any) -> SurvivorLook:
    return SurvivorLook(replace(INSIDE, **changes), OUTSIDE)


def outside(**changes: Any) -> SurvivorLook:
    return SurvivorLook(INSIDE, replace(OUTSIDE, **changes))


def thread(*frames: Frame) -> SurvivorLook:
    return inside(others=((*frames, *BEGINS),))


def state_after(*looks: SurvivorLook) -> Stillness | None:
    state: Stillness | None = None
    for number, look in enumerate(looks):
        state = after(state, look, WORLD_SIZE, number * STUCK_S / 2)
    return state


def test_one_that_only_waits_in_a_collective_of_all_ranks_is_stuck_after_a_while() -> None:
    early, late = state_after(LOOK, LOOK), state_after(LOOK, LOOK, LOOK)

    assert not is_stuck(early)
    assert is_stuck(late)
    assert not is_stuck(None)


def test_one_that_two_looks_have_found_waiting_may_get_its_error() -> None:
    assert not waits_in_vain(state_after(LOOK))
    assert waits_in_vain(state_after(LOOK, LOOK))
    assert not waits_in_vain(state_after(LOOK, outside(calls={**OUTSIDE.calls, 104: ("", "")})))
    assert not waits_in_vain(None)


def test_the_thread_that_answers_may_be_awake_and_no_other_one() -> None:
    awake, asleep = {102: ("", "")}, OUTSIDE.calls
    answering = [outside(calls={**asleep, **awake}), LOOK, outside(calls={**asleep, **awake})]
    other = [outside(calls={**asleep, 104: ("", "")}), LOOK, LOOK]

    assert is_stuck(state_after(*answering))
    assert not is_stuck(state_after(*other))


def test_one_that_was_not_seen_since_is_not_stuck_by_the_passing_of_time() -> None:
    state = Stillness(0.0, STUCK_S / 2, LOOK)

    assert not is_stuck(state)
    assert is_stuck(after(state, LOOK, WORLD_SIZE, 1.0))


@pytest.mark.parametrize(
    "look",
    [
        inside(main=frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py")),
        inside(main=frame("all_reduce", C10D)),
        # Threads that wait for work, as those of usual libraries do.
        thread(frame("_worker", f"{PYTHON}/concurrent/futures/thread.py")),
        thread(*WAITS, frame("run", f"{SITE}/tqdm/_monitor.py")),
        thread(*WAITS, frame("_feed", f"{PYTHON}/multiprocessing/queues.py")),
        thread(
            frame("select", f"{PYTHON}/selectors.py"),
            frame("wait", f"{PYTHON}/multiprocessing/connection.py"),
            frame("get", f"{PYTHON}/multiprocessing/queues.py"),
            frame("do_one_step", f"{SITE}/torch/utils/data/_utils/pin_memory.py"),
        ),
        thread(frame("_answer", f"{SITE}/elaunch/agent/forkserver/collectives.py")),
        # A GPU's recorder counts nothing on a CPU.
        inside(counts={**INSIDE.counts, (1, 0): Count(-1, -1, -1)}),
        outside(children={}),
    ],
)
def test_what_most_programs_have_besides_changes_nothing(look: SurvivorLook) -> None:
    assert is_stuck(state_after(look, look, look))


@pytest.mark.parametrize(
    "look",
    [
        # The main thread is elsewhere, or in a wait that may end well.
        inside(main=frame("save", "/home/me/train.py")),
        inside(main=frame("save", f"{SITE}/torch/serialization.py")),
        inside(main=frame("broadcast", "/home/me/distributed_c10d.py")),
        inside(main=frame("recv", C10D)),
        inside(main=frame("monitored_barrier", C10D)),
        inside(main=frame("_store_based_barrier", C10D)),
        inside(main=frame("result", f"{PYTHON}/concurrent/futures/_base.py")),
        # No collective is outstanding, or another group's is, or that is not known.
        inside(counts={(0, 0): Count(5, -1, 5)}),
        inside(counts={(0, 0): Count(6, -1, 5), (0, 1): Count(5, -1, 4)}),
        inside(counts={(0, 0): Count(5, -1, 5), (0, 1): Count(5, -1, 4)}),
        inside(counts={(0, 0): Count(6, -1, 5), (0, 1): Count(5, -1, -1)}),
        inside(counts={}),
        # All of it may go on: the failed rank is not of this group, or the collective ends by its timeout.
        inside(ranks=2),
        inside(timeout_s=5.0),
        # Another thread works, or will.
        thread(frame("write_shard", "/home/me/save.py")),
        thread(frame("_send", f"{PYTHON}/multiprocessing/connection.py"), frame("put", "/home/me/save.py")),
        thread(frame("run", f"{PYTHON}/concurrent/futures/thread.py")),
        thread(*WAITS, frame("run", f"{PYTHON}/threading.py")),
        thread(frame("select", f"{PYTHON}/selectors.py"), frame("_run_once", f"{PYTHON}/asyncio/base_events.py")),
        # A child process is not known to only load data.
        outside(children={**OUTSIDE.children, 203: "python"}),
        # A thread runs, or is in a call that is no wait; or the kernel does not say.
        outside(calls={**OUTSIDE.calls, 103: ("", "")}),
        outside(calls={**OUTSIDE.calls, 103: ("fsync", "0x4")}),
        outside(calls={**OUTSIDE.calls, 103: ("write", "0x4")}),
        outside(calls={**OUTSIDE.calls, 103: ("wait4", "0x4")}),
        outside(calls={**OUTSIDE.calls, PID: ("clock_nanosleep", "0x4")}),
        outside(calls={**OUTSIDE.calls, PID: ("poll", "0x4")}),
        outside(calls={}),
        # The signal has not been delivered: all threads block it, and one of them may wait for it.
        outside(is_pending=True),
    ],
)
def test_whatever_else_it_may_be_doing_gives_it_its_whole_grace(look: SurvivorLook) -> None:
    assert state_after(LOOK, LOOK, look) is None


@pytest.mark.parametrize(
    "look",
    [
        inside(at=(7, 26)),
        inside(at=(8, 24)),
        inside(main=frame("barrier", C10D)),
        inside(counts={**INSIDE.counts, (0, 0): Count(8, -1, 7)}),
        thread(frame("_worker", f"{PYTHON}/concurrent/futures/thread.py")),
        outside(calls={**OUTSIDE.calls, PID: ("futex", "0x9 0x2")}),
        outside(calls={**OUTSIDE.calls, 103: ("futex", "0x1")}),
        outside(written_bytes=501),
        outside(cpu_s=3.17),
        outside(children={}),
    ],
)
def test_whatever_moves_begins_the_time_anew(look: SurvivorLook) -> None:
    moved = state_after(LOOK, LOOK, look)

    assert moved is not None
    assert moved.since_s == moved.until_s
    assert moved.look == look


COUNTED = {PID: 5_000_000_000, 101: 7_000_000, 102: 9_000_000, 104: 7_000_000}


def counted_after(*ran_ns: dict[int, int]) -> Stillness | None:
    """The state after looks in half of the shorter time."""
    state: Stillness | None = None
    for number, each in enumerate(ran_ns):
        look = outside(ran_ns={**COUNTED, **each})
        state = after(state, look, WORLD_SIZE, number * survivors.STUCK_COUNTED_S / 2)
    return state


def test_where_each_threads_time_is_counted_half_of_the_time_is_enough() -> None:
    assert not is_stuck(counted_after({}, {}))
    assert is_stuck(counted_after({}, {}, {}))


def test_a_thread_that_looks_at_a_clock_may_run_for_a_moment_and_the_one_that_answers_for_long() -> None:
    assert is_stuck(counted_after({}, {104: 7_100_000}, {104: 7_200_000, 102: 30_000_000}))


def test_gloos_thread_may_turn_without_end() -> None:
    """It does when the socket of a peer has been closed."""
    turns = [
        outside(calls={**OUTSIDE.calls, 101: ("", "")}, ran_ns={**COUNTED, 101: number * 15_000_000}, cpu_s=3 + number)
        for number in range(3)
    ]

    assert is_stuck(state_after(*turns))


@pytest.mark.parametrize("tid", [PID, 104, 103])
def test_a_thread_that_has_run_for_longer_than_a_moment_begins_the_time_anew(tid: int) -> None:
    ran = counted_after({}, {}, {tid: COUNTED.get(tid, 0) + 3_000_000})

    assert ran is not None
    assert ran.since_s == ran.until_s


def test_the_thread_that_answers_may_use_a_tick() -> None:
    assert is_stuck(state_after(LOOK, LOOK, outside(cpu_s=3.15)))


ANSWER = {
    "at": [7, 24],
    "main": [["broadcast", C10D], ["handler", "/home/me/train.py"]],
    "others": [[["wait", f"{PYTHON}/threading.py"]]],
    "answers": 102,
    "loops": [101],
    "tracker": 202,
    "ranks": 3,
    "timeout_s": 1800.0,
}
NUMBERS = {"last_enqueued_collective": 6, "last_started_collective": -1, "last_completed_collective": 5}


def test_an_answer_is_read() -> None:
    text = json.dumps(ANSWER).encode() + b"\n" + json.dumps({"pg_status": {"0": NUMBERS}}).encode()

    found = read_inside(text)

    others = ((frame("wait", f"{PYTHON}/threading.py"),),)
    counts = {(0, 0): Count(6, -1, 5)}
    assert found == replace(INSIDE, others=others, counts=counts)
    assert survivors.collective(found.main) == "broadcast"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer.pop("at"),
        lambda answer: answer.update(at=[1]),
        lambda answer: answer.update(main=[]),
        lambda answer: answer.update(main=[["broadcast"]]),
        lambda answer: answer.update(others=7),
        lambda answer: answer.update(tracker="x"),
        lambda answer: answer.pop("loops"),
        lambda answer: answer.update(loops=7),
        lambda answer: answer.update(ranks=None),
        lambda answer: answer.update(timeout_s="soon"),
    ],
)
def test_an_answer_of_another_form_says_nothing(spoil: Callable[[dict[str, Any]], object]) -> None:
    answer = dict(ANSWER)
    spoil(answer)

    assert read_inside(json.dumps(answer).encode()) is None


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"\xff\n{}", b"[" * 60_000])
def test_a_line_that_is_no_answer_says_nothing(text: bytes) -> None:
    assert read_inside(text) is None
