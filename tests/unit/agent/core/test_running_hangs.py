"""agent.core.running and diagnosis.hang: when ranks are idle, and what an agent does about it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Action, Blame, KeepStacks, NotifyWorkers, PeerFailed, SignalWorkers, TakeStacks
from elaunch.agent.core.events import GroupFailed, Sampled, Signalled, StacksTaken, Tick, WorkerEnded, WorkerListens
from elaunch.agent.core.state import Running, Stopping
from elaunch.agent.diagnosis.hang import SAMPLE_GAP_S_MAX, HangState, Window, after_windows
from elaunch.agent.diagnosis.stack_groups import Frame, Stack, ThreadStack
from elaunch.rendezvous.rules.hang_verdict import IdleReason
from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.diagnosis.test_stack_groups import ALL_REDUCE, GPU_WAIT, LIB, STEP, stack
from tests.unit.agent.driver import ALL, TERM, TIMES, Driver, failure, pair, settle, started

IDLE = Window(5.0, 0.01, 0.0, 0.0, 0, "S")
SPINS = Window(5.0, 4.9, 4.9, 0.1, 0, "R")
WORKS = Window(5.0, 2.0, 2.0, 0.1, 5000, "R")
HELD = Window(5.0, 0.0, 0.0, 0.0, 0, "T")
LOOP = (Frame("spin", "/home/me/train.py", 12),)


def watching(*, restarts: bool = False) -> Driver:
    driver = started()
    times = replace(TIMES, hang_after_s=60.0)
    driver.agent = replace(driver.agent, times=times, restarts_hung=restarts)
    return driver


@pytest.fixture
def driver() -> Driver:
    """A single node that watches for hangs."""
    return watching()


def busy(rank: int, values: str = "", *, gil: bool = True) -> Stack:
    main = ThreadStack("MainThread", LOOP, is_main=True, is_active=True, holds_gil=gil, values=values)
    return Stack(rank, 4000 + rank, (main,), "R")


# Ranks of a job on GPUs: the main thread spins in C, without the GIL, and its process does other things too.
OUTSTANDS = replace(WORKS, is_outstanding=True)
FIRST, OTHER = (
    "in collective 38 of the default group (all_reduce)",
    "after collective 37 of the default group (all_reduce)",
)


def on_gpu(rank: int, *, waits: bool = True, gil: bool = False) -> Stack:
    return replace(busy(rank, gil=gil), entered=FIRST if waits else OTHER, waits=waits)


WAITING = tuple(stack(rank, *ALL_REDUCE) for rank in ALL)
ONE_LOOPS = (WAITING[0], busy(1), WAITING[2])


def samples(driver: Driver, for_s: float, windows: dict[int, Window], stacks: tuple[Stack, ...] = ()) -> list[Action]:
    """Give the agent these windows for that long, and these stacks when it takes them. Returns its other actions."""
    done: list[Action] = []
    for _ in range(int(for_s / 5)):
        driver.now_s += 5.0
        for action in driver.happen(Sampled(0, windows)):
            if isinstance(action, TakeStacks):
                done += driver.happen(StacksTaken(0, stacks))
            else:
                done.append(action)
        driver.settle()
        done += driver.happen(Tick())
        driver.settle()
    return done


def logged(driver: Driver) -> str:
    return "\n".join(getattr(action, "text", "") for action in driver.all_acted)


IDLE_AND_LOOP = {0: IDLE, 1: SPINS, 2: IDLE}
ALL_IDLE = dict.fromkeys(ALL, IDLE)


def test_a_rank_in_a_loop_is_named_when_all_have_stood_still_for_the_limit_and_not_before(driver: Driver) -> None:
    samples(driver, 55, IDLE_AND_LOOP, ONE_LOOPS)
    early = logged(driver)
    samples(driver, 5, IDLE_AND_LOOP, ONE_LOOPS)

    assert "hang" not in early
    assert (
        "the job seems to hang: rank 1 (pid 4001 on node-a) runs in spin (train.py:12)"
        ", at the same line in every sample, while ranks 0, 2"
        " wait in all_reduce (train_step, train.py:41), for 60 s\n"
        "  ranks 0, 2: all_reduce (torch/distributed/distributed_c10d.py:2810) ← train_step (train.py:41)\n"
        "  rank 1: spin (train.py:12)" in logged(driver)
    )
    assert [action.generation for action in driver.all_acted if isinstance(action, KeepStacks)] == [0]
    assert not any(isinstance(action, Blame) for action in driver.all_acted)


def test_a_verdict_is_logged_once_and_is_a_failure_only_on_request() -> None:
    driver = watching(restarts=True)
    samples(driver, 300, IDLE_AND_LOOP, ONE_LOOPS)

    assert logged(driver).count("the job seems to hang") == 1
    (blamed,) = (action for action in driver.all_acted if isinstance(action, Blame))
    assert (blamed.local_rank, blamed.message.partition(",")[0]) == (1, "hung: it runs in spin (train.py:12)")
    assert not blamed.is_blameless


def test_another_sample_at_the_same_lines_writes_nothing(driver: Driver) -> None:
    samples(driver, 90, IDLE_AND_LOOP, ONE_LOOPS)
    before = driver.store.read("").revision

    samples(driver, 300, IDLE_AND_LOOP, ONE_LOOPS)

    assert driver.store.read("").revision == before


@pytest.mark.parametrize(
    ("windows", "stacks"),
    [
        # Evaluation on one rank, a download, a person at a prompt, a debugger, programs that serve.
        ({**ALL_IDLE, 1: WORKS}, WAITING),
        (ALL_IDLE, (*WAITING[:2], stack(2, STEP, call="read", target="/dev/pts/0"))),
        (ALL_IDLE, (*WAITING[:2], replace(stack(2, STEP), state="t"))),
        (ALL_IDLE, tuple(stack(rank, STEP, call="accept4", target="socket:[1]") for rank in ALL)),
        (ALL_IDLE, tuple(stack(rank, STEP) for rank in ALL)),
        # Beside ranks that spin in a collective one evaluates, or compiles: it has none that has not ended.
        ({**dict.fromkeys(ALL, OUTSTANDS), 1: WORKS}, (on_gpu(0), on_gpu(1, waits=False), on_gpu(2))),
        # It has begun one, and does something that holds the GIL before it waits.
        (dict.fromkeys(ALL, OUTSTANDS), (on_gpu(0), on_gpu(1, gil=True), on_gpu(2))),
    ],
)
def test_what_is_no_hang_is_none_for_ever(windows: dict[int, Window], stacks: tuple[Stack, ...]) -> None:
    driver = watching()
    samples(driver, 900, windows, stacks)

    assert "hang" not in logged(driver)


LOOPS = [(WAITING[0], busy(1, str(number)), WAITING[2]) for number in range(20)]
REDUCES = [tuple(replace(each, entered=f"in collective {number}") for each in WAITING) for number in range(20)]


@pytest.mark.parametrize(
    ("windows", "each"), [(IDLE_AND_LOOP, LOOPS), (ALL_IDLE, REDUCES)], ids=["variables change", "other collectives"]
)
def test_ranks_at_the_same_line_with_other_values_go_on(
    driver: Driver, windows: dict[int, Window], each: list[tuple[Stack, ...]]
) -> None:
    for stacks in each:
        samples(driver, 30, windows, stacks)

    assert "hang" not in logged(driver)


@pytest.mark.parametrize(
    "slow",
    [
        stack(1, STEP, call="read", target="/mnt/data/shard-3"),
        stack(1, STEP, call="clock_nanosleep"),
        busy(1, gil=False),
        Stack(1, 4001, trouble="py-spy is not installed"),
    ],
)
def test_what_may_end_by_itself_gets_five_times_as_long(driver: Driver, slow: Stack) -> None:
    windows = {**ALL_IDLE, 1: SPINS} if slow.main and slow.main.is_active else ALL_IDLE
    stacks = (WAITING[0], slow, WAITING[2])

    samples(driver, 295, windows, stacks)
    early = logged(driver)
    samples(driver, 5, windows, stacks)

    assert "hang" not in early
    assert "the job seems to hang: rank 1 " in logged(driver)


def test_that_a_job_has_resumed_is_logged_and_its_record_removed(driver: Driver) -> None:
    samples(driver, 80, ALL_IDLE, WAITING)
    assert driver.snapshot.hang
    assert driver.snapshot.still[0]

    samples(driver, 5, {**ALL_IDLE, 1: WORKS})

    assert "the job is no longer idle" in logged(driver)
    assert (driver.snapshot.hang, driver.snapshot.still) == (None, {})


def test_a_rank_that_sigstop_holds_is_named(driver: Driver) -> None:
    held = replace(stack(1, *ALL_REDUCE), state="T")
    samples(driver, 80, {**ALL_IDLE, 1: HELD}, (WAITING[0], held, WAITING[2]))

    assert (
        "rank 1 (pid 4001 on node-a) is stopped by a signal (SIGSTOP) (train_step, train.py:41), while ranks 0, 2 wait"
        in logged(driver)
    )
    assert "\nto let rank 1 continue: kill -CONT 4001\nto see all threads: elaunch stacks" in logged(driver)


def test_while_an_exit_is_not_explained_no_rank_hangs(driver: Driver) -> None:
    driver.happen(WorkerEnded(0, 1))
    driver.exits(0, 1, FailureKind.PEER_LOST)

    driver.happen(Sampled(0, {1: IDLE, 2: IDLE}))

    assert isinstance(driver.agent.phase, Running)
    assert driver.agent.phase.hang_state == HangState()


def test_a_rank_that_exited_while_the_others_wait_is_named(driver: Driver) -> None:
    samples(driver, 600, {**ALL_IDLE, 1: WORKS})
    driver.exits(1, 0)
    # It was the one that worked: how long the others waited for it says nothing.
    samples(driver, 55, {0: IDLE, 2: IDLE}, (WAITING[0], WAITING[2]))
    assert "hang" not in logged(driver)

    samples(driver, 5, {0: IDLE, 2: IDLE}, (WAITING[0], WAITING[2]))

    assert "rank 1 on node-a exited with code 0, while ranks 0, 2 wait in all_reduce" in logged(driver)


def test_where_stacks_cannot_be_read_workers_that_listen_show_theirs(driver: Driver) -> None:
    driver.happen(WorkerListens(0, 2, to_stop=True, to_failure=True))
    samples(driver, 320, ALL_IDLE, tuple(Stack(rank, 1, trouble="py-spy is not installed") for rank in ALL))

    assert "all 3 ranks use no CPU (py-spy is not installed)" in logged(driver)
    notified = [action.local_ranks for action in driver.all_acted if isinstance(action, NotifyWorkers)]
    assert notified == [frozenset({2})]


def test_a_sample_without_stacks_is_followed_by_another(driver: Driver) -> None:
    samples(driver, 120, ALL_IDLE)

    taken = [action for action in driver.all_acted if isinstance(action, TakeStacks)]
    assert len(taken) > 1


def reporting(window: Window, last: str = "without a report since step 7", *, is_silent: bool = True) -> Window:
    """What a worker did whose program reports its steps, where the user gave a limit."""
    return replace(window, is_silent=is_silent, reported=last)


@pytest.mark.parametrize("other", [WORKS, IDLE, SPINS])
def test_ranks_that_report_nothing_for_the_limit_hang_whatever_they_do(driver: Driver, other: Window) -> None:
    silent = {0: reporting(IDLE), 1: reporting(other, "without a report since step 6"), 2: reporting(IDLE)}
    stacks = (WAITING[0], stack(1, STEP, call="clock_nanosleep"), WAITING[2])

    samples(driver, 55, silent, stacks)
    early = logged(driver)
    samples(driver, 5, silent, (WAITING[0], busy(1, "other values"), WAITING[2]))

    assert "hang" not in early
    assert (
        "the job seems to hang: rank 1 (pid 4001 on node-a) runs in spin (train.py:12), without a report since step 6,"
        " while ranks 0, 2 wait in all_reduce (train_step, train.py:41), without a report since step 7, for 60 s"
    ) in logged(driver)


def test_ranks_that_report_do_not_hang_however_idle_they_are(driver: Driver) -> None:
    samples(driver, 600, dict.fromkeys(ALL, reporting(IDLE, is_silent=False)), WAITING)

    assert not any(isinstance(action, TakeStacks) for action in driver.all_acted)


def test_silent_ranks_whose_stacks_cannot_be_read_are_not_called_idle(driver: Driver) -> None:
    unread = tuple(Stack(rank, 1, trouble="py-spy is not installed") for rank in ALL)

    samples(driver, 60, dict.fromkeys(ALL, reporting(WORKS)), unread)

    assert "all 3 ranks show no stack (py-spy is not installed), without a report since step 7, for 60" in logged(
        driver
    )


def test_a_hang_is_a_failure_of_the_group_and_a_worker_that_failed_before_is_its_cause() -> None:
    hung = GroupFailed(0, failure(0, 1, None, FailureKind.HANG))
    driver, late = watching(restarts=True), watching(restarts=True)
    driver.happen(WorkerListens(0, 2, to_stop=True, to_failure=True))

    done = driver.happen(hung)
    late.exits(1, 3)

    assert done == [NotifyWorkers(0, frozenset({2}), PeerFailed(0)), SignalWorkers(0, frozenset({0, 1}), TERM)]
    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.HANG]
    assert late.happen(hung) == []
    assert [f.kind for f in late.snapshot.failures[0]] == [FailureKind.EXIT_CODE]


def test_ranks_that_spin_in_a_collective_that_does_not_end_hang_after_five_times_the_limit(driver: Driver) -> None:
    """Their GPUs may still compute before the collective."""
    samples(driver, 295, dict.fromkeys(ALL, OUTSTANDS), tuple(on_gpu(rank) for rank in ALL))
    early = logged(driver)
    samples(driver, 5, dict.fromkeys(ALL, OUTSTANDS), tuple(on_gpu(rank) for rank in ALL))

    assert "hang" not in early
    assert f"all 3 ranks wait in spin (train.py:12), {FIRST} for 300 s" in logged(driver)


def in_commit(rank: int, *, line: int, active: bool) -> Stack:
    """A rank whose Keeper polls the GPU in a commit; `line` is where in that loop it is."""
    poll = replace(GPU_WAIT[0], line=line)
    found = stack(rank, poll, *GPU_WAIT[1:], call="clock_nanosleep", active=active)
    return replace(found, entered=FIRST, waits=True)


def test_ranks_that_wait_in_a_commit_for_a_collective_of_their_gpu_are_not_somewhere_else(driver: Driver) -> None:
    # They sleep a moment or poll the GPU, by chance.
    taken = (
        tuple(in_commit(rank, line=81 + number % 2, active=number % 2 == 1) for rank in (0, 2)) for number in range(99)
    )

    for zero, two in itertools.islice(taken, 60):
        samples(driver, 5, {0: OUTSTANDS, 1: SPINS, 2: OUTSTANDS}, (zero, busy(1), two))

    assert (
        "the job seems to hang: rank 1 (pid 4001 on node-a) runs in spin (train.py:12)"
        ", at the same line in every sample, while ranks 0, 2"
        f" wait for the GPU (train_step, train.py:41), {FIRST}, for 300 s" in logged(driver)
    )


def test_the_time_in_which_the_agent_was_stopped_is_not_counted() -> None:
    state = after_windows(HangState(), ALL, ALL_IDLE)

    asleep = after_windows(state, ALL, dict.fromkeys(ALL, replace(IDLE, seconds=3600.0)))

    assert (state.idle_s, asleep.idle_s) == (5.0, 0.0)
    assert SAMPLE_GAP_S_MAX < 3600


@pytest.mark.parametrize(
    ("window", "stands"),
    [
        (IDLE, True),
        (replace(IDLE, cpu_s=0.3), False),
        (replace(IDLE, io_bytes=100_000), False),
        (replace(IDLE, children_cpu_s=4.0), False),
        (replace(IDLE, faults=500), False),
        (SPINS, True),
        # Two ranks on one core: the rest of the time it waited for the core.
        (replace(SPINS, cpu_s=2.0, main_cpu_s=2.0, main_delay_s=2.9), True),
        (replace(SPINS, faults=50), False),
        (replace(SPINS, switches=101), False),
        (WORKS, False),
        (OUTSTANDS, True),
        (replace(OUTSTANDS, seconds=3600.0), False),
        (HELD, True),
    ],
)
def test_who_stands_still(window: Window, stands: bool) -> None:
    state = after_windows(HangState(), frozenset({0}), {0: window})

    assert (state.idle_s > 0) is stands


def two_nodes() -> tuple[Driver, Driver]:
    """Two agents of a running job, which watch for hangs; the first leads."""
    return pair(slots=2, times=replace(TIMES, hang_after_s=60.0))


def both(
    one: Driver, other: Driver, for_s: float, first: dict[int, Window], second: dict[int, Window], *loop: Stack
) -> None:
    for _ in range(int(for_s / 5)):
        samples(one, 5, first, WAITING[:2])
        samples(other, 5, second, (stack(2, *ALL_REDUCE), *loop))
        for driver in (one, other):
            driver.happen(driver.snapshot_changed)
            driver.settle()


def test_one_nodes_idle_ranks_prove_nothing_while_another_node_works() -> None:
    one, other = two_nodes()
    before = one.store.read("").revision

    both(one, other, 600, {0: IDLE, 1: IDLE}, {0: IDLE, 1: WORKS})

    assert one.store.read("").revision == before + 1
    assert "hang" not in logged(one) + logged(other)


def test_the_leader_names_a_rank_of_another_node_and_both_nodes_log_it() -> None:
    one, other = two_nodes()
    for driver in (one, other):
        driver.agent = replace(driver.agent, restarts_hung=True)
    seats = one.snapshot.tables[0].seats

    both(one, other, 55, {0: IDLE, 1: IDLE}, {0: IDLE, 1: SPINS}, busy(3))
    early = logged(one)
    both(one, other, 10, {0: IDLE, 1: IDLE}, {0: IDLE, 1: SPINS}, busy(3))

    assert "hang" not in early
    text = (
        "the job seems to hang: rank 3 (pid 4003 on node-b) runs in spin (train.py:12)"
        ", at the same line in every sample, while"
    )
    assert text in logged(one)
    assert text in logged(other)
    assert re.search(r"ranks 0, 1, 2 wait in all_reduce .*, for 6[05] s", logged(one))
    assert [seat.host for seat in seats] == ["node-a", "node-b"]
    assert [action.local_rank for action in other.all_acted if isinstance(action, Blame)] == [1]
    assert not any(isinstance(action, Blame) for action in one.all_acted)
    assert {g.kind for n in one.snapshot.still[0].values() for g in n.groups} == {IdleReason.WAITS, IdleReason.RUNS}


def test_a_node_whose_programs_have_ended_while_their_processes_stay_is_what_the_others_wait_for() -> None:
    one, other = two_nodes()
    for rank in (0, 1):
        other.happen(WorkerEnded(0, rank))

    both(one, other, 80, {0: IDLE, 1: IDLE}, {0: IDLE, 1: IDLE})

    assert "rank 2 on node-b and others (ranks 2, 3) reached the end of the program, while ranks 0, 1" in logged(one)


def test_a_failure_for_which_no_rank_differs_is_marked_as_no_evidence() -> None:
    driver = watching(restarts=True)
    samples(driver, 300, ALL_IDLE, WAITING)

    (blamed,) = (action for action in driver.all_acted if isinstance(action, Blame))
    assert (blamed.local_rank, blamed.is_blameless) == (-1, True)


def test_a_lock_that_a_busy_helper_may_open_is_waited_for() -> None:
    reads = ThreadStack("helper", (Frame("load", "/home/me/data.py", 5),), syscall="read", target="/mnt/x")
    locked = stack(1, STEP)
    helped = replace(locked, threads=(*locked.threads, reads))

    for one, hangs in ((locked, True), (helped, False)):
        driver = watching()
        samples(driver, 80, ALL_IDLE, (WAITING[0], one, WAITING[2]))
        assert ("the job seems to hang: rank 1 (pid 4001 on node-a) waits for a lock" in logged(driver)) is hangs


def test_a_data_loader_is_shown_with_what_its_process_does() -> None:
    frames = (Frame("__next__", f"{LIB}/site-packages/torch/utils/data/dataloader.py", 9), STEP)
    child = stack(1, Frame("load", "/home/me/data.py", 5))
    driver = watching()
    samples(driver, 80, ALL_IDLE, (WAITING[0], replace(stack(1, *frames, call="poll"), children=(child,)), WAITING[2]))

    assert (
        "rank 1 (pid 4001 on node-a) waits for its data loader (train_step, train.py:41)"
        ", whose process 4001 waits for a lock or for another"
        " thread in load (data.py:5), while" in logged(driver)
    )


def test_a_job_that_is_stopped_while_it_hangs_does_not_go_on_after_all() -> None:
    one, other = two_nodes()
    both(one, other, 80, {0: IDLE, 1: IDLE}, {0: IDLE, 1: SPINS}, busy(3))
    assert "seems to hang" in logged(other)

    one.happen(Signalled(2, "SIGINT"))
    settle(one, other)

    assert isinstance(other.agent.phase, Stopping)
    assert "no longer idle" not in logged(one) + logged(other)
