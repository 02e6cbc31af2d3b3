"""agent.core.lingering, and when it is asked: a rank whose program has ended while its process lives on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Blame, NameLingering
from elaunch.agent.core.events import Tick, WorkerReturned
from elaunch.agent.core.lingering import lingering_words
from elaunch.agent.core.stack_groups import Frame, Stack, ThreadStack
from elaunch.agent.core.step import deadline_s
from tests.unit.agent.core.test_stack_groups import LIB
from tests.unit.agent.core.test_standstill import ALL, IDLE, SPINS, WAITING, said, samples, watching
from tests.unit.agent.driver import Driver

JOIN = (Frame("_shutdown", f"{LIB}/threading.py", 1590),)
SLEEPS = (Frame("watch_forever", "/home/me/train.py", 10),)
WATCH = ThreadStack("Thread-1 (watch_forever)", SLEEPS, syscall="clock_nanosleep")
TQDM = ThreadStack("Thread-2 (monitor)", SLEEPS, syscall="futex")


def ended(rank: int, *frames: Frame, threads: tuple[ThreadStack, ...] = (), **more: object) -> Stack:
    main = (ThreadStack("MainThread", frames, is_main=True, syscall="futex"),) if frames else ()
    return replace(Stack(rank, 4000 + rank, (*main, *threads), "S"), **more)  # type: ignore[arg-type]


def why(stack: Stack, *names: str) -> str:
    first, out = lingering_words([stack], {stack.rank: names}, "node-a", 60.0, "night")
    assert out == "to end the job now: elaunch stop night"
    head, _, kept = first.partition(" not exited: ")
    assert head == "the program of rank 1 (pid 4001 on node-a) ended at least 60 s ago, but its process has"
    return kept


THREAD = "Python waits for its thread 'Thread-1 (watch_forever)', which sleeps (watch_forever, train.py:10)"
DAEMON = "; a thread with daemon=True is not waited for"


@pytest.mark.parametrize(
    ("stack", "names", "kept"),
    [
        (ended(1, *JOIN, threads=(TQDM, WATCH)), (WATCH.name,), THREAD + DAEMON),
        # It was started after the program's end.
        (ended(1, *JOIN, threads=(WATCH,)), (), THREAD + DAEMON),
        (ended(1, trouble="it may not look"), ("w",), f"Python waits for its thread 'w'{DAEMON}"),
        (
            ended(1, Frame("cleanup", "/home/me/train.py", 8)),
            (),
            "it waits for a lock or for another thread (cleanup, train.py:8)",
        ),
        (
            ended(1, Frame("poll", f"{LIB}/multiprocessing/popen_fork.py", 27), children=(ended(9, *SLEEPS),)),
            (),
            "it waits for a child process (poll, multiprocessing/popen_fork.py:27); its child process is 4009, which"
            " waits for a lock or for another thread (watch_forever, train.py:10)",
        ),
        (ended(1, trouble="it runs no Python, or"), (), "an exit function or destructor of C or C++ has not returned"),
        (ended(1, trouble="it may not look"), (), "it may not look"),
    ],
)
def test_what_keeps_a_process_is_named(stack: Stack, names: tuple[str, ...], kept: str) -> None:
    assert why(stack, *names) == kept


def test_ranks_that_the_same_keeps_are_one_line() -> None:
    stacks = [ended(rank, *JOIN, threads=(WATCH,)) for rank in range(6)]

    line, _ = lingering_words(stacks, {}, "node-a", 60.0, "night")

    who = "the program of ranks 0–5 (pids 4000, 4001, 4002, 4003, … on node-a)"
    assert line.startswith(f"{who} ended at least 60 s ago, but their processes have")
    assert lingering_words([], {}, "node-a", 60.0, "night") == ()


def later(driver: Driver, seconds: float) -> None:
    driver.now_s += seconds
    driver.happen(Tick())


def named(driver: Driver) -> list[frozenset[int]]:
    return [action.local_ranks for action in driver.all_acted if isinstance(action, NameLingering)]


def test_a_process_that_outlives_its_program_for_the_limit_is_named_once_with_those_that_ended_with_it() -> None:
    driver = watching()
    driver.happen(WorkerReturned(0, 1))
    later(driver, 0.5)
    driver.happen(WorkerReturned(0, 2))
    assert deadline_s(driver.agent) == driver.now_s + 69.5

    later(driver, 69.0)
    early = named(driver)
    later(driver, 0.5)
    later(driver, 600.0)

    assert early == []
    assert named(driver) == [frozenset({1, 2})]


def test_a_process_that_exits_in_time_is_not_named() -> None:
    driver = watching()
    driver.happen(WorkerReturned(0, 1))
    driver.exits(1, 0)
    later(driver, 600.0)

    assert named(driver) == []


def test_ranks_that_wait_for_one_whose_program_has_ended_hang_whatever_its_threads_do() -> None:
    driver = watching(restarts=True)
    driver.happen(WorkerReturned(0, 1))

    samples(driver, 80, {0: IDLE, 1: SPINS, 2: IDLE}, (WAITING[0], WAITING[2]))

    assert "rank 1 on node-a reached the end of the program, while ranks 0, 2 wait in all_reduce" in said(driver)
    assert [action.local_rank for action in driver.all_acted if isinstance(action, Blame)] == [1]


@pytest.mark.parametrize(("left", "times"), [(JOIN, 1), (SLEEPS, 0)], ids=["joins threads", "runs"])
def test_programs_that_report_no_end_are_named_once_by_their_stacks(left: tuple[Frame, ...], times: int) -> None:
    """As with --no-python."""
    driver = watching(restarts=True)
    stacks = (ended(0, *JOIN, threads=(WATCH,)), ended(1, *JOIN), ended(2, *left))

    samples(driver, 70, dict.fromkeys(ALL, IDLE), stacks)

    assert named(driver) == [frozenset(ALL)] * times
    assert any(isinstance(action, Blame) for action in driver.all_acted) is (not times), "work that is done comes again"


def test_processes_that_all_outlive_their_programs_are_no_hang() -> None:
    driver = watching(restarts=True)
    for rank in ALL:
        driver.happen(WorkerReturned(0, rank))

    samples(driver, 600, dict.fromkeys(ALL, IDLE))

    assert "hang" not in said(driver)
    assert not any(isinstance(action, Blame) for action in driver.all_acted)
