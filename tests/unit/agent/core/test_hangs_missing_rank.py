"""agent.core.hangs: the worker that did not come to a collective that timed out on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Action, Blame, KeepStacks, LookAtStacks, PeerFailed, SignalWorkers, TellWorkers
from elaunch.agent.core.events import (
    Event,
    Signalled,
    StacksTaken,
    StoreLost,
    Tick,
    WorkerExited,
    WorkerListens,
    WorkerRaised,
    WorkerReturned,
    WorkerSaving,
    WorkersHung,
    WorkerStopped,
)
from elaunch.agent.core.hangs import LOOK_S, timed_out
from elaunch.agent.core.state import Broken, Running, Stopping
from elaunch.agent.diagnosis.collectives import DEFAULT_GROUP, Collective, evidence
from elaunch.agent.diagnosis.stack_groups import Stack
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import Failure, FailureKind, OpenKind, Outcome, OutcomeKind
from tests.unit.agent.diagnosis.test_exit_status import failure as failure_of_worker
from tests.unit.agent.diagnosis.test_exit_status import record_of
from tests.unit.agent.diagnosis.test_stack_groups import BACKWARD, GPU_WAIT, STEP, TOP, stack
from tests.unit.agent.driver import KEYS, TERM, Driver, failure, pair, settle, started

GLOO = "lost a peer in backward (RuntimeError: Timed out waiting 4000ms for recv operation to complete)"
OWN = (
    "lost a peer in from_all (elaunch.trainer.ranks.connections.PeerLost: collective operation timeout: waited 0.5 s"
    " for rank 1, channel elaunch/0/0/ranks/0)"
)
ALL_REDUCED = "lost a peer in all_reduce (RuntimeError: Timed out waiting 1500ms for send operation to complete)"
NCCL = "lost a peer (BrokenGroup: step 5 is not committed, since … failed (TIMEOUT, group 0, nccl))"


def timeout_of(rank: int, message: str = GLOO, host: str = "node-a") -> Failure:
    return replace(failure(0, rank, 1, FailureKind.PEER_LOST, host), message=message)


def times_out(driver: Driver, rank: int, message: str = GLOO) -> list[Action]:
    return driver.happen(WorkerExited(0, rank, 1, timeout_of(rank, message)))


def shows(driver: Driver, *stacks: Stack) -> list[Action]:
    return driver.happen(StacksTaken(0, stacks))


def sleeping(rank: int) -> Stack:
    return stack(rank, STEP, TOP, call="clock_nanosleep")


def blamed(actions: Sequence[Action]) -> Blame:
    (found,) = (action for action in actions if isinstance(action, Blame))
    return found


@pytest.mark.parametrize(
    ("sentence", "rank", "words"),
    [
        (timeout_of(2).sentence, 2, "the all-reduce of a backward pass for 4 s"),
        (timeout_of(0, ALL_REDUCED).sentence, 0, "all_reduce for 1.5 s"),
        (timeout_of(0, OWN).sentence, 0, "from_all for 0.5 s"),
        (timeout_of(0, OWN.replace(" in from_all", "")).sentence, 0, "for 0.5 s"),
    ],
)
def test_a_failure_says_which_collective_timed_out(sentence: str, rank: int, words: str) -> None:
    found = timed_out(sentence)

    assert found
    assert (found.rank, found.words) == (rank, words)


@pytest.mark.parametrize(
    "message",
    [
        "lost a peer in backward (RuntimeError: Connection closed by peer [10.0.0.1]:1234)",
        "raised TimeoutError: Timed out waiting 4000ms for recv operation",
        "was killed by SIGKILL",
        # The others wait for the GPU, which no stack tells from the one that was late.
        NCCL,
    ],
)
def test_other_failures_are_no_timeouts_and_are_not_looked_into(message: str) -> None:
    driver = started()

    done = times_out(driver, 0, message)

    assert timed_out(timeout_of(0, message).sentence) is None
    assert not any(isinstance(action, LookAtStacks) for action in done)


def test_the_rank_that_did_not_come_is_the_failure_and_not_those_that_waited() -> None:
    driver = started()
    driver.happen(WorkerRaised(0, 2))

    looked = times_out(driver, 0)
    waits = times_out(driver, 2)
    named = shows(driver, sleeping(1))

    assert looked == [LookAtStacks(0, frozenset({1}))]
    assert waits == []
    assert blamed(named) == Blame(
        0,
        1,
        "did not come to the collective that timed out on ranks 0, 2 (the all-reduce of a backward pass for 4 s); it"
        " sleeps (train_step, train.py:41),",
        is_blameless=True,
    )
    assert any(isinstance(action, KeepStacks) for action in named)

    done = driver.happen(WorkersHung(0, failure(0, 1, None, FailureKind.HANG)))

    assert done == [SignalWorkers(0, frozenset({1}), TERM)]
    assert [(f.rank, f.kind) for f in driver.snapshot.failures[0]] == [(1, FailureKind.HANG)]


def test_ranks_that_raise_or_save_are_on_their_way_out_and_are_not_looked_at() -> None:
    driver = started()
    driver.happen(WorkerRaised(0, 1))
    driver.happen(WorkerSaving(0, 2, 4))

    done = times_out(driver, 0)

    assert done == []


def test_of_two_that_were_elsewhere_none_is_named_since_one_may_handle_the_error() -> None:
    driver = started()
    times_out(driver, 0)

    done = shows(driver, stack(1, STEP, TOP), sleeping(2))

    kept, stopped = done
    assert isinstance(kept, KeepStacks)
    assert "=== ranks 1, 2 " in kept.text
    assert stopped == SignalWorkers(0, frozenset({1, 2}), TERM)
    assert [(f.rank, f.kind) for f in driver.snapshot.failures[0]] == [(0, FailureKind.PEER_LOST)]


def recorded(found: Stack, number: int) -> Stack:
    entry = Collective(DEFAULT_GROUP, number, "all_reduce", 0.0, has_begun=True, is_outstanding=False)
    return replace(found, entered=evidence({found.rank: [entry]})[found.rank].words)


@pytest.mark.parametrize(("late", "other", "is_blameless"), [(4, 5, False), (5, 5, True), (6, 5, True)])
def test_a_rank_that_began_fewer_collectives_counts_against_its_node(late: int, other: int, is_blameless: bool) -> None:
    driver = started()
    times_out(driver, 0)

    named = blamed(shows(driver, recorded(sleeping(1), late), recorded(stack(2, *BACKWARD), other)))

    assert (named.local_rank, named.is_blameless) == (1, is_blameless)


def test_a_rank_that_waits_for_its_gpu_is_not_named() -> None:
    driver = started()
    times_out(driver, 0)

    done = shows(driver, stack(1, *GPU_WAIT, call="clock_nanosleep"), stack(2, *BACKWARD))

    assert done == [SignalWorkers(0, frozenset({1, 2}), TERM)]


def test_an_end_that_is_held_for_another_reason_is_the_cause_and_no_look_replaces_it() -> None:
    driver = started()
    driver.exits(1, -15, FailureKind.SIGNAL)

    done = times_out(driver, 0)

    assert done == [SignalWorkers(0, frozenset({2}), TERM)]
    assert [(f.rank, f.kind) for f in driver.snapshot.failures[0]] == [(1, FailureKind.SIGNAL)]


def test_stacks_that_do_not_come_in_time_are_not_waited_for() -> None:
    driver = started()
    times_out(driver, 0)

    driver.now_s += LOOK_S
    done = driver.happen(Tick())

    assert done == [SignalWorkers(0, frozenset({1, 2}), TERM)]
    assert shows(driver, sleeping(1)) == []


def test_another_node_whose_rank_did_not_come_names_it_in_its_own_record() -> None:
    first, second = pair()
    message = timeout_of(0)
    for rank in (1, 2):
        first.happen(WorkerRaised(0, rank))
    first.happen(WorkerExited(0, 0, 1, message))

    looked = second.settle()
    assert isinstance(second.agent.phase, Running)
    named = shows(second, *(stack(rank, *BACKWARD) for rank in (3, 5)), sleeping(4))
    record = failure(0, 1, None, FailureKind.HANG, "node-b")
    second.happen(WorkersHung(0, replace(record, node_id=second.node_id, rank=4)))
    settle(first, second)

    assert looked == [LookAtStacks(0, frozenset({0, 1, 2}))]
    assert blamed(named).local_rank == 1
    assert "timed out on rank 0 (the all-reduce" in blamed(named).message
    assert {(f.rank, f.kind) for f in first.snapshot.failures[0]} == {
        (0, FailureKind.PEER_LOST),
        (4, FailureKind.HANG),
    }


def told_of_failure(driver: Driver, done: Sequence[Action]) -> bool:
    assert isinstance(driver.agent.phase, Stopping)
    told = [action.message for action in done if isinstance(action, TellWorkers)]
    return isinstance(driver.agent.phase.mode, Broken) and told == [PeerFailed(0)]


def listening() -> Driver:
    driver = started()
    for rank in (1, 2):
        driver.happen(WorkerListens(0, rank, to_stop=True, to_failure=True))
    return driver


def test_ranks_that_wait_for_others_as_well_are_not_named() -> None:
    driver = started()
    times_out(driver, 0)

    done = shows(driver, stack(1, *BACKWARD), stack(2, *BACKWARD))

    assert done == [SignalWorkers(0, frozenset({1, 2}), TERM)]
    assert [(f.rank, f.kind) for f in driver.snapshot.failures[0]] == [(0, FailureKind.PEER_LOST)]


@pytest.mark.parametrize("event", [WorkerReturned(0, 1), WorkerStopped(0, 1, 4)])
def test_a_rank_at_its_end_is_not_told_as_one_that_waited(event: Event) -> None:
    driver = started()
    driver.happen(event)
    times_out(driver, 0)

    assert "timed out on rank 0 (" in blamed(shows(driver, sleeping(2))).message


@pytest.mark.parametrize("kind", [OpenKind.JOIN, OpenKind.LEAVE])
def test_a_node_that_comes_or_goes_during_the_look_does_not_hide_the_failure(kind: OpenKind) -> None:
    driver = listening()
    times_out(driver, 0)

    driver.open(1, kind, "node-b comes or goes")
    done = driver.settle()

    assert told_of_failure(driver, done)
    assert [(f.rank, f.kind) for f in driver.snapshot.failures[0]] == [(0, FailureKind.PEER_LOST)]


@pytest.mark.parametrize("event", [Signalled(15, "SIGTERM"), Signalled(2, "SIGINT"), StoreLost("it is gone")])
def test_who_exits_during_the_look_stops_a_broken_group_and_keeps_the_failure(event: Event) -> None:
    driver = listening()
    times_out(driver, 0)

    done = driver.happen(event)

    assert told_of_failure(driver, done)
    assert isinstance(driver.agent.phase, Stopping)
    assert [f.rank for f in driver.agent.phase.failures] == [0]


def test_the_end_of_the_job_during_the_look_stops_a_broken_group() -> None:
    driver = listening()
    times_out(driver, 0)

    ended = Outcome(OutcomeKind.FAILED, "a person cancelled it", 0, 0, 3)
    driver.write(Put(KEYS.ended, encode(ended)))
    done = driver.settle()

    assert told_of_failure(driver, done)


def test_a_failure_elsewhere_during_the_look_waits_for_its_end() -> None:
    driver = started()
    times_out(driver, 0)

    driver.open(1)
    done = driver.settle()

    assert done == []
    assert blamed(shows(driver, sleeping(1))).local_rank == 1


@pytest.mark.parametrize(
    ("message", "is_looked_into"),
    [
        ("[/pytorch/gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete", True),
        ("[/pytorch/gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for send operation to complete", True),
        ("collective operation timeout: waited 1.5 s for other ranks, channel elaunch/0/0/ranks/0", True),
        ("collective operation timeout: waited 1e+06 s for rank 3, channel elaunch/0/0/ranks/0", True),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600000 ms", False),
        ("step 7 is not committed: a collective took longer than the timeout (TIMEOUT, group 0)", False),
    ],
)
def test_the_words_of_a_timeout_are_known_by_whoever_reads_them(message: str, is_looked_into: bool) -> None:
    found = failure_of_worker(1, record_of("RuntimeError", message))

    assert found.kind is FailureKind.PEER_LOST
    assert (timed_out(found.sentence) is not None) is is_looked_into


def test_a_rank_that_dies_meanwhile_is_the_cause() -> None:
    driver = started()
    times_out(driver, 0)

    driver.exits(1, -9, FailureKind.SIGNAL)

    assert [(f.rank, f.kind) for f in driver.snapshot.failures[0]] == [(1, FailureKind.SIGNAL)]
