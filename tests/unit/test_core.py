"""agent.core.step: what an agent decides. A memory store carries out its transactions; nothing else is real."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core import (
    HOLD_S,
    KILL_WAIT_S,
    LAST_WORDS_S,
    Agent,
    Exited,
    Finished,
    Joining,
    Running,
    Stopping,
    deadline_s,
    step,
)
from elaunch.agent.events import (
    Action,
    Clear,
    Cleared,
    Commit,
    Event,
    Exit,
    Join,
    Looked,
    ReplaceForkServer,
    Say,
    ServiceLost,
    Signalled,
    SignalWorkers,
    Spawn,
    Tick,
    WorkerExited,
    WorkerRaised,
)
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.forming import join
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.snapshot import Keys, Snapshot, read_snapshot
from elaunch.rendezvous.store import Txn
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    JobSpec,
    Joined,
    Node,
    Outcome,
    OutcomeKind,
    Program,
    ProgramKind,
)

KEYS = Keys("job")
SPEC = JobSpec("job", Program(ProgramKind.SCRIPT, "train.py"), max_restarts=3)
ME = Node("node-a-1", "node-a", "127.0.0.1", 3, 4711)
INT, KILL, TERM = 2, 9, 15
STOP_GRACE_S, FAILURE_GRACE_S = 30.0, 2.0
ALL = frozenset({0, 1, 2})


class Driver:
    """One agent on a memory store, at a time that only the test moves. `acted` are the actions of the last event."""

    def __init__(self, spec: JobSpec = SPEC) -> None:
        self.store = MemoryStore()
        self.agent = Agent(ME, spec, STOP_GRACE_S, FAILURE_GRACE_S, Snapshot(KEYS))
        self.now_s = 100.0
        self.acted: list[Action] = []

    @property
    def snapshot(self) -> Snapshot:
        return read_snapshot(KEYS, self.store.read(KEYS.root))

    def happen(self, event: Event) -> list[Action]:
        self.agent, actions = step(self.agent, event, self.now_s)
        self.acted = list(actions)
        for action in actions:
            if isinstance(action, Commit):
                self.store.commit(action.txn)
            elif isinstance(action, Join):
                self.store.commit(join(self.agent.snapshot, Joined(ME.node_id, 29500)))
        return [action for action in actions if not isinstance(action, (Say, Commit))]

    def look(self) -> list[Action]:
        """Look at the store until that changes nothing any more; all that was done."""
        done: list[Action] = []
        while True:
            revision = self.store.read(KEYS.root).revision
            done += self.happen(Looked(self.snapshot))
            if self.store.read(KEYS.root).revision == revision:
                return done

    def exits(self, local_rank: int, code: int, kind: FailureKind = FailureKind.EXIT_CODE) -> list[Action]:
        """A worker of the current generation ends."""
        phase = self.agent.phase
        assert isinstance(phase, (Running, Stopping))
        return self.happen(exited(phase.table.generation, local_rank, code, kind))

    @property
    def said(self) -> str:
        return "\n".join(action.text for action in self.acted if isinstance(action, Say))


def exited(generation: int, local_rank: int, code: int, kind: FailureKind = FailureKind.EXIT_CODE) -> WorkerExited:
    return WorkerExited(generation, local_rank, code, failure(generation, local_rank, code, kind) if code else None)


def failure(generation: int, rank: int, code: int | None, kind: FailureKind = FailureKind.EXIT_CODE) -> Failure:
    said = "raised RuntimeError: no peer" if kind is FailureKind.PEER_LOST else f"exited with code {code}"
    message = f"{said} {'x' * generation}"
    return Failure(kind, generation, ME.node_id, ME.host, rank, rank, 100 + rank, code, message, progressed=True)


def lost(generation: int, *, workers_too: bool) -> ServiceLost:
    kind = FailureKind.TEMPLATE_LOST if workers_too else FailureKind.STORE_LOST
    return ServiceLost(generation, replace(failure(generation, -1, None, kind), message="it ended"), workers_too)


def running(spec: JobSpec = SPEC) -> Driver:
    driver = Driver(spec)
    driver.look()
    assert isinstance(driver.agent.phase, Running)
    return driver


def test_a_new_agent_opens_the_job_joins_and_starts_its_workers() -> None:
    driver = Driver()

    done = driver.look()

    assert [type(action) for action in done] == [Join, Spawn]
    spawn = done[-1]
    assert isinstance(spawn, Spawn)
    assert (spawn.table.generation, spawn.group_rank, spawn.table.world_size) == (0, 0, 3)
    assert driver.agent.phase == Running(spawn.table, ALL)


def test_looking_again_starts_nothing_twice() -> None:
    driver = running()

    again = driver.happen(Looked(driver.snapshot))

    assert again == []


def test_a_generation_is_joined_once() -> None:
    driver = Driver()
    driver.happen(Looked(driver.snapshot))
    unsealed = driver.snapshot

    first, second = driver.happen(Looked(unsealed)), driver.happen(Looked(unsealed))

    assert (first, second) == ([Join(0)], [])


def test_a_failed_worker_stops_its_siblings_and_opens_the_next_generation() -> None:
    driver = running()

    done = driver.exits(1, 3)

    assert done == [SignalWorkers(0, frozenset({0, 2}), TERM)]
    snapshot = driver.snapshot
    assert snapshot.generation
    assert snapshot.generation.number == 1
    assert [f.local_rank for f in snapshot.failures[0]] == [1]
    assert "stopping 2 others" in driver.said


def test_the_failure_is_written_in_the_transaction_that_opens_the_generation() -> None:
    driver = running()

    driver.exits(1, 3)

    written = [action.txn for action in driver.acted if isinstance(action, Commit)]
    assert len(written) == 1
    assert set(written[0].puts) == {KEYS.generation, KEYS.failure(0, ME.node_id)}
    assert set(written[0].guards) == {driver.agent.snapshot.gen_guard, driver.agent.snapshot.live_guard}
    assert isinstance(driver.acted[0], Commit), "the others are told before anything is stopped"


def test_the_next_generation_starts_only_when_all_workers_are_gone_and_cleared_away() -> None:
    driver = running()
    driver.exits(1, 3)

    spawned = [driver.look(), driver.exits(0, -TERM), driver.look(), driver.exits(2, -TERM), driver.look()]
    after_clear = driver.happen(Cleared(0)) + driver.look()

    assert not [action for actions in spawned for action in actions if isinstance(action, (Spawn, Join))]
    assert spawned[3] == [Clear(0)]
    assert [type(action) for action in after_clear] == [Join, Spawn]
    assert driver.snapshot.table
    assert (driver.snapshot.table.generation, driver.snapshot.table.restarts) == (1, 1)


def test_a_lone_worker_that_fails_is_cleared_away_at_once() -> None:
    driver = running()
    for rank in (0, 1):
        driver.exits(rank, 0)

    assert driver.exits(2, 1) == [Clear(0)]


def test_a_worker_that_exits_with_nought_stops_nobody() -> None:
    driver = running()

    assert driver.exits(0, 0) == []
    assert isinstance(driver.agent.phase, Running)
    assert driver.agent.phase.live == {1, 2}


def test_a_job_ends_in_success_when_all_workers_exited_with_nought() -> None:
    driver = running()
    for rank in (2, 0, 1):
        driver.exits(rank, 0)

    finished = driver.happen(Cleared(0))
    phase = driver.agent.phase
    done = driver.look()

    assert finished == []
    assert isinstance(phase, Finished)
    assert [type(action) for action in done] == [Exit]
    assert isinstance(driver.agent.phase, Exited)
    assert driver.agent.phase.outcome.exit_code == 0
    assert driver.snapshot.ended == driver.agent.phase.outcome


def test_a_spent_budget_ends_the_job_with_exit_code_1_and_the_last_failure() -> None:
    driver = running(replace(SPEC, max_restarts=1))
    for _ in range(2):
        driver.exits(0, 5)
        for rank in (1, 2):
            driver.exits(rank, -TERM)
        driver.happen(Cleared(driver.agent.phase.table.generation))  # type: ignore[union-attr]
        done = driver.look()

    assert [type(action) for action in done][-1] is Exit
    assert isinstance(driver.agent.phase, Exited)
    outcome = driver.agent.phase.outcome
    assert (outcome.kind, outcome.exit_code, outcome.restarts) == (OutcomeKind.FAILED, 1, 1)
    assert outcome.failure
    assert (outcome.failure.generation, outcome.failure.code) == (1, 5)


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_no_more_generations_than_the_budget_allows(max_restarts: int) -> None:
    driver = running(replace(SPEC, max_restarts=max_restarts))
    groups = 1

    while not isinstance(driver.agent.phase, Exited):
        driver.exits(0, 5)
        for rank in (1, 2):
            driver.exits(rank, -TERM)
        driver.happen(Cleared(groups - 1))
        groups += sum(isinstance(action, Spawn) for action in driver.look())

    assert groups == 1 + max_restarts


def test_workers_that_do_not_end_are_killed_after_the_failure_grace() -> None:
    driver = running()
    driver.exits(1, 3)

    due_s = deadline_s(driver.agent)
    driver.now_s = 100.0 + FAILURE_GRACE_S - 0.01
    early = driver.happen(Tick())
    driver.now_s = 100.0 + FAILURE_GRACE_S
    late = driver.happen(Tick())

    assert due_s == 100.0 + FAILURE_GRACE_S
    assert early == []
    assert late == [SignalWorkers(0, frozenset({0, 2}), KILL)]
    assert "local rank 0, 2 still ran after 2 s" in driver.said


def test_a_fork_server_that_does_not_report_killed_workers_is_replaced() -> None:
    driver = running()
    driver.exits(1, 3)
    driver.now_s += FAILURE_GRACE_S
    driver.happen(Tick())

    due_s = deadline_s(driver.agent)
    driver.now_s += KILL_WAIT_S
    replaced, at_once_again = driver.happen(Tick()), driver.happen(Tick())
    after = driver.happen(lost(0, workers_too=True))

    assert due_s == driver.now_s
    assert (replaced, at_once_again) == ([ReplaceForkServer(0)], [])
    assert after == [Clear(0)]
    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.EXIT_CODE]


def test_the_loss_of_the_worker_store_is_a_failure_that_stops_all_workers() -> None:
    driver = running()

    done = driver.happen(lost(0, workers_too=False))

    assert done == [SignalWorkers(0, ALL, TERM)]
    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.STORE_LOST]


def test_the_loss_of_the_fork_server_is_a_failure_that_leaves_nobody_to_stop() -> None:
    driver = running()

    done = driver.happen(lost(0, workers_too=True))

    assert done == [Clear(0)]
    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.TEMPLATE_LOST]


def test_the_loss_of_the_worker_store_while_stopping_changes_nothing() -> None:
    driver = running()
    driver.exits(1, 3)
    before = driver.agent

    assert driver.happen(lost(0, workers_too=False)) == []
    assert driver.agent == before


def test_the_loss_of_the_fork_server_after_the_last_worker_clears_nothing_twice() -> None:
    driver = running()
    driver.exits(1, 3)
    driver.exits(0, -TERM)
    last = driver.exits(2, -TERM)

    assert last == [Clear(0)]
    assert driver.happen(lost(0, workers_too=True)) == []


def test_an_exit_that_is_told_twice_clears_nothing_twice() -> None:
    driver = running()
    driver.exits(1, 3)
    driver.exits(0, -TERM)
    last = driver.exits(2, -TERM)

    again = driver.exits(2, -TERM)

    assert (last, again) == ([Clear(0)], [])


@pytest.mark.parametrize("code", [-TERM, -INT])
def test_a_worker_that_died_of_a_schedulers_signal_is_no_failure_if_the_agents_comes_too(code: int) -> None:
    driver = running()

    held = driver.exits(0, code)
    due_s = deadline_s(driver.agent)
    driver.now_s += HOLD_S / 2
    told = driver.happen(Signalled(-code, "SIGX"))

    assert held == []
    assert due_s == 100.0 + HOLD_S
    assert told == [SignalWorkers(0, frozenset({1, 2}), -code)]
    assert not driver.snapshot.failures


def test_a_worker_that_died_of_sigterm_alone_is_a_failure_after_a_moment() -> None:
    driver = running()
    driver.exits(0, -TERM)

    driver.now_s += HOLD_S
    done = driver.happen(Tick())

    assert done == [SignalWorkers(0, frozenset({1, 2}), TERM)]
    assert [f.code for f in driver.snapshot.failures[0]] == [-TERM]


def test_other_workers_deaths_do_not_put_off_the_moment() -> None:
    driver = running()
    driver.exits(0, -TERM)

    driver.now_s += HOLD_S / 2
    driver.exits(1, -TERM)

    assert deadline_s(driver.agent) == 100.0 + HOLD_S


def test_the_held_death_stays_the_first_failure_when_another_worker_fails_too() -> None:
    driver = running()
    driver.exits(0, -TERM)

    done = driver.exits(1, 7)

    assert done == [SignalWorkers(0, frozenset({2}), TERM)]
    assert [f.code for f in driver.snapshot.failures[0]] == [-TERM]


def test_a_held_death_is_not_forgotten_when_all_others_end_well() -> None:
    driver = running()
    driver.exits(0, -TERM)
    driver.exits(1, 0)
    driver.exits(2, 0)

    driver.now_s += HOLD_S
    done = driver.happen(Tick())

    assert done == [Clear(0)]
    assert [f.code for f in driver.snapshot.failures[0]] == [-TERM]


@pytest.mark.parametrize(("signum", "name"), [(TERM, "SIGTERM"), (INT, "SIGINT")])
def test_a_signal_is_passed_on_and_ends_the_agent_with_128_and_its_number(signum: int, name: str) -> None:
    driver = running()

    passed_on = driver.happen(Signalled(signum, name))
    due_s = deadline_s(driver.agent)
    ends = [driver.exits(rank, code) for rank, code in ((0, -signum), (1, 0), (2, 3))]
    last = driver.happen(Cleared(0))

    assert passed_on == [SignalWorkers(0, ALL, signum)]
    assert due_s == 100.0 + STOP_GRACE_S
    assert ends == [[], [], [Clear(0)]]
    assert [type(action) for action in last] == [Exit]
    assert isinstance(driver.agent.phase, Exited)
    assert driver.agent.phase.outcome.exit_code == 128 + signum
    assert name in driver.agent.phase.outcome.reason


def test_workers_that_ignore_a_signal_are_killed_after_the_stop_grace() -> None:
    driver = running()
    driver.happen(Signalled(TERM, "SIGTERM"))

    driver.now_s += STOP_GRACE_S
    done = driver.happen(Tick())

    assert done == [SignalWorkers(0, ALL, KILL)]
    assert "still ran after 30 s" in driver.said


def test_a_second_ctrl_c_kills_now() -> None:
    driver = running()
    driver.happen(Signalled(INT, "SIGINT"))
    driver.exits(0, -INT)

    second = driver.happen(Signalled(INT, "SIGINT"))
    third = driver.happen(Signalled(INT, "SIGINT"))

    assert second == [SignalWorkers(0, frozenset({1, 2}), KILL)]
    assert third == []


def test_a_second_ctrl_c_does_not_wait_for_output_that_nobody_reads() -> None:
    driver = running()
    driver.happen(Signalled(TERM, "SIGTERM"))
    for rank in range(3):
        driver.exits(rank, -TERM)

    done = driver.happen(Signalled(INT, "SIGINT"))

    assert [type(action) for action in done] == [Exit]
    assert isinstance(driver.agent.phase, Exited)
    assert driver.agent.phase.outcome.exit_code == 128 + TERM


def test_a_second_sigterm_is_not_in_a_hurry() -> None:
    driver = running()
    driver.happen(Signalled(TERM, "SIGTERM"))

    assert driver.happen(Signalled(TERM, "SIGTERM")) == []


def test_a_signal_while_stopping_after_a_failure_ends_the_agent_instead_of_a_restart() -> None:
    driver = running()
    driver.exits(1, 3)

    passed_on = driver.happen(Signalled(INT, "SIGINT"))
    for rank in (0, 2):
        driver.exits(rank, -INT)
    last = driver.happen(Cleared(0))

    assert passed_on == [SignalWorkers(0, frozenset({0, 2}), INT)]
    assert [type(action) for action in last] == [Exit]
    assert isinstance(driver.agent.phase, Exited)
    assert driver.agent.phase.outcome.exit_code == 130


def test_a_signal_while_stopping_after_a_failure_still_kills_in_time_and_says_the_right_number() -> None:
    driver = running()
    driver.exits(1, 3)
    driver.happen(Signalled(TERM, "SIGTERM"))

    driver.now_s = 100.0 + FAILURE_GRACE_S
    done = driver.happen(Tick())

    assert done == [SignalWorkers(0, frozenset({0, 2}), KILL)]
    assert "after 2 s" in driver.said


def test_a_signal_before_the_workers_are_cleared_away_is_not_lost() -> None:
    driver = running()
    driver.happen(lost(0, workers_too=True))

    told = driver.happen(Signalled(TERM, "SIGTERM"))
    last = driver.happen(Cleared(0))

    assert told == []
    assert [type(action) for action in last] == [Exit]


def test_a_signal_while_no_workers_run_ends_the_agent_at_once() -> None:
    driver = Driver()
    driver.happen(Looked(driver.snapshot))

    done = driver.happen(Signalled(TERM, "SIGTERM"))

    assert [type(action) for action in done] == [Exit]
    assert isinstance(driver.agent.phase, Exited)
    assert driver.agent.phase.outcome.exit_code == 143


def test_an_agent_that_has_exited_does_nothing_more() -> None:
    driver = Driver()
    driver.happen(Signalled(TERM, "SIGTERM"))
    before = driver.agent.phase

    for event in (Looked(driver.snapshot), exited(0, 0, 1), lost(0, workers_too=True), Cleared(0), Tick()):
        driver.happen(event)
        assert not [action for action in driver.acted if not isinstance(action, (Commit, Say))]

    assert driver.agent.phase == before


@pytest.mark.parametrize(
    "event",
    [
        exited(0, 0, 1),
        exited(0, 0, 0),
        exited(0, 0, -TERM),
        exited(2, 0, 1),
        lost(0, workers_too=False),
        lost(0, workers_too=True),
        lost(-1, workers_too=True),
        Cleared(0),
        Tick(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stopping", [False, True])
def test_an_event_of_another_generation_changes_nothing(event: Event, stopping: bool) -> None:
    driver = running()
    driver.happen(lost(0, workers_too=True))
    driver.happen(Cleared(0))
    driver.look()
    if stopping:
        driver.exits(2, 3)
    before, store_before = driver.agent, driver.store.read(KEYS.root)

    done = driver.happen(event)

    assert driver.agent == before
    assert (done, driver.acted) == ([], [])
    assert driver.store.read(KEYS.root) == store_before


def test_the_output_that_arrived_last_completes_the_failures_record() -> None:
    driver = running()
    driver.happen(exited(0, 1, 3))
    for rank in (0, 2):
        driver.exits(rank, -TERM)
    tail = 'Traceback (most recent call last):\n  File "/t.py", line 3, in f\nValueError: late\n'

    driver.happen(Cleared(0, {1: tail, 0: "other"}, reached_store=True))

    (record,) = driver.snapshot.failures[0]
    assert (record.exception, record.tail, record.progressed) == ("ValueError", tail, True)


def test_a_peers_death_found_while_stopping_is_blamed_instead_of_the_one_who_told_of_it() -> None:
    driver = running()
    driver.exits(0, 1, FailureKind.PEER_LOST)
    driver.exits(1, -KILL, FailureKind.SIGNAL)
    driver.exits(2, -TERM, FailureKind.SIGNAL)

    driver.happen(Cleared(0))

    (record,) = driver.snapshot.failures[0]
    assert (record.rank, record.code) == (1, -KILL)
    assert driver.said == f"the cause: {record.sentence}"


def test_a_cause_that_was_named_already_is_not_named_again() -> None:
    driver = running()
    driver.exits(1, -KILL, FailureKind.SIGNAL)
    driver.exits(0, 1, FailureKind.PEER_LOST)
    driver.exits(2, -TERM, FailureKind.SIGNAL)

    driver.happen(Cleared(0))

    assert not driver.said


def test_a_worker_that_we_ended_is_not_blamed() -> None:
    driver = running()
    driver.exits(0, 1, FailureKind.PEER_LOST)
    driver.exits(1, -TERM, FailureKind.SIGNAL)
    driver.now_s += FAILURE_GRACE_S
    driver.happen(Tick())
    driver.exits(2, -KILL, FailureKind.SIGNAL)

    driver.happen(Cleared(0))

    (record,) = driver.snapshot.failures[0]
    assert record.rank == 0


def test_a_failure_of_its_own_is_not_taken_back_for_a_later_one() -> None:
    driver = running()
    driver.exits(0, 1)
    driver.exits(1, 9)
    driver.exits(2, -TERM)

    driver.happen(Cleared(0))

    (record,) = driver.snapshot.failures[0]
    assert record.rank == 0


def test_a_generation_whose_workers_ran_is_not_run_again_while_the_store_is_slow_to_tell() -> None:
    driver = running()
    old = driver.snapshot
    driver.happen(lost(0, workers_too=True))

    done = driver.happen(Cleared(0)) + driver.happen(Looked(old))
    later = driver.look()

    assert not [action for action in done if isinstance(action, (Spawn, Join))]
    assert [type(action) for action in later] == [Join, Spawn]
    assert isinstance(later[-1], Spawn)
    assert later[-1].table.generation == 1


def test_a_generation_that_another_opened_stops_the_workers() -> None:
    driver = running()
    moved = replace(driver.snapshot.generation, number=1, cause="rank 9 failed elsewhere")  # type: ignore[type-var]
    driver.store.commit(Txn((), {KEYS.generation: encode(moved)}))

    done = driver.happen(Looked(driver.snapshot))

    assert done == [SignalWorkers(0, ALL, TERM)]
    assert driver.said == "stopping: rank 9 failed elsewhere"
    assert deadline_s(driver.agent) == 100.0 + FAILURE_GRACE_S


def test_a_finished_node_runs_again_when_a_generation_was_opened() -> None:
    driver = running()
    for rank in range(3):
        driver.exits(rank, 0)
    moved = replace(driver.snapshot.generation, number=1, cause="rank 9 failed elsewhere")  # type: ignore[type-var]
    record = {KEYS.failure(0, "other"): encode(failure(0, 9, 1))}
    driver.store.commit(Txn((), {KEYS.generation: encode(moved), **record}))

    driver.happen(Looked(driver.snapshot))
    driver.happen(Cleared(0))
    done = driver.look()

    assert [type(action) for action in done] == [Join, Spawn]
    assert isinstance(driver.agent.phase, Running)
    assert driver.agent.phase.table.generation == 1
    assert not driver.snapshot.done


def test_a_node_without_a_seat_waits() -> None:
    driver = Driver()
    driver.happen(Looked(driver.snapshot))
    driver.happen(Looked(driver.snapshot))
    txn = next(a.txn for a in [*step(driver.agent, Looked(driver.snapshot), 0.0)[1]] if isinstance(a, Commit))
    puts = {key: value.replace(ME.node_id, "other") if "table" in key else value for key, value in txn.puts.items()}
    driver.store.commit(Txn((), puts))

    done = driver.look()

    assert done == []
    assert isinstance(driver.agent.phase, Joining)


def test_an_end_that_was_written_ends_a_waiting_agent() -> None:
    driver = Driver()
    driver.happen(Looked(driver.snapshot))
    ended = Outcome(OutcomeKind.FAILED, "cancelled", 0, 0, 3)
    driver.store.commit(Txn((), {KEYS.ended: encode(ended)}))

    done = driver.happen(Looked(driver.snapshot))

    assert done == [Exit(ended)]


def test_an_agent_wants_no_tick_without_a_deadline() -> None:
    driver = Driver()
    deadlines = [deadline_s(driver.agent)]
    driver.look()
    deadlines.append(deadline_s(driver.agent))
    driver.happen(lost(0, workers_too=True))
    deadlines.append(deadline_s(driver.agent))

    assert deadlines == [None, None, None]


def test_restarts_are_dated_by_the_agents_own_clock() -> None:
    driver = running()
    driver.happen(lost(0, workers_too=True))
    driver.happen(Cleared(0))

    driver.now_s = 250.0
    driver.look()

    assert driver.agent.restart_times_s == (250.0,)


def test_a_worker_that_raised_and_does_not_end_is_killed_after_the_stop_grace() -> None:
    driver = running()
    driver.happen(WorkerRaised(0, 1))
    driver.now_s += STOP_GRACE_S - 0.001
    early = driver.happen(Tick())
    driver.now_s += 0.001

    late = driver.happen(Tick())

    assert early == []
    assert late == [SignalWorkers(0, frozenset({1}), KILL)]
    assert driver.happen(Tick()) == []


def test_a_worker_that_raised_and_ends_by_itself_is_left_alone() -> None:
    driver = running()
    driver.happen(WorkerRaised(0, 1))
    assert deadline_s(driver.agent) == driver.now_s + STOP_GRACE_S

    driver.happen(exited(0, 1, 0))

    assert deadline_s(driver.agent) is None
    driver.now_s += 10 * STOP_GRACE_S
    assert driver.happen(Tick()) == []


@pytest.mark.parametrize("code", [-TERM, 128 + TERM])
def test_a_sibling_that_our_own_sigterm_ended_is_not_blamed(code: int) -> None:
    driver = running()
    driver.exits(0, 1, FailureKind.PEER_LOST)

    driver.exits(1, code)

    assert isinstance(driver.agent.phase, Stopping)
    assert driver.agent.phase.others == ()


def test_a_stop_does_not_wait_for_ever_for_output_that_nobody_reads() -> None:
    driver = running()
    driver.happen(Signalled(TERM, "SIGTERM"))
    for rank in range(3):
        driver.exits(rank, 0)
    due_s = deadline_s(driver.agent)
    assert due_s == driver.now_s + LAST_WORDS_S

    driver.now_s = due_s
    done = driver.happen(Tick())

    assert [type(action) for action in done] == [Exit]
