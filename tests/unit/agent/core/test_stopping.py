"""agent.core.stopping: signals, deadlines, clearing up, and what comes after."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGPIPE as PIPE

import pytest

from elaunch.agent.core.actions import Clear, Commit, Join, Log, ReplaceForkServer, SignalWorkers, Spawn
from elaunch.agent.core.events import Cleared, Signalled, Tick
from elaunch.agent.core.state import Finished
from elaunch.agent.core.step import deadline_s
from elaunch.agent.core.stopping import KILL_WAIT_S, OUTPUT_WAIT_S
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import FailureKind, OpenKind, Outcome, OutcomeKind
from tests.unit.agent.driver import (
    ALL,
    FAILURE_GRACE_S,
    INT,
    KEYS,
    KILL,
    SPEC,
    START_S,
    STOP_GRACE_S,
    TERM,
    Driver,
    cleared,
    ends,
    exited,
    lost,
    started,
)


def test_the_next_generation_starts_only_when_all_workers_are_gone_and_cleared_away(driver: Driver) -> None:
    driver.exits(1, 3)

    spawned = [driver.settle(), driver.exits(0, -TERM), driver.settle(), driver.exits(2, -TERM), driver.settle()]
    after_clear = driver.happen(cleared(0)) + driver.settle()

    assert not [action for actions in spawned for action in actions if isinstance(action, (Spawn, Join))]
    assert spawned[3] == [Clear(0)]
    assert [type(action) for action in after_clear] == [Join, Spawn]
    assert driver.snapshot.table
    assert (driver.snapshot.table.generation, driver.snapshot.table.restarts) == (1, 1)


def test_workers_that_do_not_end_are_killed_after_the_failure_grace(driver: Driver) -> None:
    driver.exits(1, 3)

    due_s = deadline_s(driver.agent)
    driver.now_s = START_S + FAILURE_GRACE_S - 0.01
    early = driver.happen(Tick())
    driver.now_s = START_S + FAILURE_GRACE_S
    late = driver.happen(Tick())

    assert due_s == START_S + FAILURE_GRACE_S
    assert early == []
    assert late == [SignalWorkers(0, frozenset({0, 2}), KILL)]
    assert "local rank 0, 2 still ran after 2 s" in driver.logged


def test_a_fork_server_that_does_not_report_killed_workers_is_replaced(driver: Driver) -> None:
    driver.exits(1, 3)
    driver.after(FAILURE_GRACE_S)

    due_s = deadline_s(driver.agent)
    replaced, logged, at_once_again = driver.after(KILL_WAIT_S), driver.logged, driver.happen(Tick())
    after = driver.happen(lost(0, workers_too=True))

    assert due_s == driver.now_s
    assert (replaced, at_once_again) == ([ReplaceForkServer(0)], [])
    assert logged == "local rank 0, 2 did not exit within 5 s of SIGKILL; replacing the fork server"
    assert after == [Clear(0)]
    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.EXIT_CODE]


@pytest.mark.parametrize(("signum", "name"), [(TERM, "SIGTERM"), (INT, "SIGINT"), (1, "SIGHUP")])
def test_a_signal_is_passed_on_and_ends_the_agent_with_128_and_its_number(signum: int, name: str) -> None:
    driver = started()

    passed_on = driver.happen(Signalled(signum, name))
    due_s = deadline_s(driver.agent)
    ends = [driver.exits(rank, code) for rank, code in ((0, -signum), (1, 0), (2, 3))]
    last = driver.happen(cleared(0))

    assert passed_on == [SignalWorkers(0, ALL, signum)]
    assert due_s == START_S + STOP_GRACE_S
    assert ends == [[], [], [Clear(0)]]
    assert last == []
    assert driver.outcome.exit_code == 128 + signum
    assert driver.outcome.reason == f"{name} was received"


def test_on_sigterm_the_nodes_keys_go_as_the_next_generation_is_opened(driver: Driver) -> None:
    driver.happen(Signalled(TERM, "SIGTERM"))

    left = {KEYS.generation, KEYS.member(driver.node_id), KEYS.joined(0, driver.node_id)}
    assert [{op.key for op in written.then} for written in driver.commits] == [left, {KEYS.leader}]
    snapshot, generation = driver.snapshot, driver.generation
    assert (snapshot.members, snapshot.leader, snapshot.ended) == ({}, "", None)
    assert (generation.number, generation.kind) == (1, OpenKind.LEAVE)
    assert generation.cause == "node-a leaves (SIGTERM was received)"
    assert generation.node_id == driver.node_id


def test_a_finished_node_that_leaves_restarts_no_worker(driver: Driver) -> None:
    ends(driver)
    assert isinstance(driver.agent.phase, Finished)

    done = driver.happen(Signalled(TERM, "SIGTERM"))

    assert done == []
    assert driver.generation.number == 0
    assert driver.snapshot.members == {}


@pytest.mark.parametrize(
    ("signum", "nodes_max", "live", "text"),
    [
        (TERM, 1, 3, "SIGX: stopping 3 workers, SIGKILL in 30 s"),
        (TERM, 1, 1, "SIGX: stopping 1 worker, SIGKILL in 30 s"),
        (INT, 1, 3, "SIGX: stopping 3 workers, SIGKILL in 30 s; Ctrl-C again kills now"),
        (TERM, 2, 3, "SIGX: leaving the job, stopping 3 workers, SIGKILL in 30 s"),
        (INT, 2, 3, "SIGX: stopping 3 workers, SIGKILL in 30 s; Ctrl-C again kills now"),
    ],
)
def test_a_signal_is_logged(driver: Driver, signum: int, nodes_max: int, live: int, text: str) -> None:
    driver.agent = replace(driver.agent, spec=replace(SPEC, nodes_max=nodes_max))
    for rank in range(live, 3):
        driver.exits(rank, 0)

    driver.happen(Signalled(signum, "SIGX"))

    assert driver.logged == text


def test_a_second_ctrl_c_kills_now(driver: Driver) -> None:
    driver.happen(Signalled(INT, "SIGINT"))
    driver.exits(0, -INT)

    second = driver.happen(Signalled(INT, "SIGINT"))
    third = driver.happen(Signalled(INT, "SIGINT"))

    assert second == [SignalWorkers(0, frozenset({1, 2}), KILL)]
    assert third == []


def test_the_first_ctrl_c_kills_no_worker_while_the_job_stops_for_that_of_another_node(driver: Driver) -> None:
    """srun, mpirun and a terminal send Ctrl-C to all nodes, and the store's news may come first."""
    ended = Outcome(OutcomeKind.INTERRUPTED, "SIGINT was received by node-b", 0, 0, 3, signum=INT)
    driver.write(Put(KEYS.ended, encode(ended)))
    driver.sync()
    driver.now_s += 0.2

    first = driver.happen(Signalled(INT, "SIGINT"))
    logged = driver.logged
    second = driver.happen(Signalled(INT, "SIGINT"))

    assert (first, logged) == ([], "SIGINT: stopping already, SIGKILL in 30 s; Ctrl-C again kills now")
    assert second == [SignalWorkers(0, ALL, KILL)]


def test_a_ctrl_c_on_a_node_that_leaves_ends_the_job_for_the_others_too(driver: Driver) -> None:
    driver.agent = replace(driver.agent, spec=replace(SPEC, nodes_max=2))
    driver.happen(Signalled(TERM, "SIGTERM"))
    assert driver.snapshot.ended is None

    driver.happen(Signalled(INT, "SIGINT"))

    ended = driver.snapshot.ended
    assert ended
    assert (ended.kind, ended.exit_code) == (OutcomeKind.INTERRUPTED, 130)
    assert ended.reason == "SIGINT was received by node-a"
    assert driver.logged.startswith("SIGINT: the whole job ends; stopping already, SIGKILL in 30 s")


def test_a_ctrl_c_on_a_node_that_left_does_not_end_the_run_that_others_began_since(driver: Driver) -> None:
    driver.happen(Signalled(TERM, "SIGTERM"))
    for number in (1, 2):
        driver.sees(number, OpenKind.START, "the job starts")

    driver.happen(Signalled(INT, "SIGINT"))

    assert driver.snapshot.ended is None
    assert driver.logged == "SIGINT: stopping already, SIGKILL in 30 s; Ctrl-C again kills now"


@pytest.mark.parametrize("signum", [INT, TERM])
def test_a_signal_while_stopping_after_a_failure_ends_the_agent_instead_of_a_restart(signum: int) -> None:
    driver = started()
    driver.exits(1, 3)

    passed_on = driver.happen(Signalled(signum, "SIGX"))
    driver.settle()
    driver.all_exit(-signum)
    last = driver.happen(cleared(0))

    assert passed_on == [SignalWorkers(0, frozenset({0, 2}), signum)]
    assert last == []
    assert driver.outcome.exit_code == 128 + signum


def test_a_signal_before_the_workers_are_cleared_away_is_not_lost(driver: Driver) -> None:
    driver.happen(lost(0, workers_too=True))

    notified = driver.happen(Signalled(TERM, "SIGTERM"))
    due_s = deadline_s(driver.agent)
    last = driver.happen(cleared(0))

    assert notified == []
    assert due_s == driver.now_s + OUTPUT_WAIT_S
    assert last == []


def test_a_signal_to_a_node_that_is_just_done_records_that_and_leaves() -> None:
    driver = started(replace(SPEC, nodes_max=2))
    driver.all_exit()

    done = driver.happen(Signalled(TERM, "SIGTERM"))

    assert done == []
    assert driver.outcome.exit_code == 143
    assert driver.snapshot.done[0] == {driver.node_id}
    assert not driver.snapshot.members


def test_ctrl_c_before_the_node_is_part_of_the_job_leaves_the_job_alone() -> None:
    other = started(replace(SPEC, nodes_max=2))
    driver = Driver(replace(SPEC, nodes_max=2), store=other.store, host="node-b").begin()
    driver.answer()
    driver.sync()

    done = driver.happen(Signalled(INT, "SIGINT"))

    assert done == []
    assert driver.snapshot.ended is None


def test_a_stop_does_not_wait_for_ever_for_output_without_a_reader(driver: Driver) -> None:
    driver.happen(Signalled(TERM, "SIGTERM"))
    for rank in range(2):
        driver.exits(rank, 0)
    assert deadline_s(driver.agent) == driver.now_s + STOP_GRACE_S
    driver.exits(2, 0)
    due_s = deadline_s(driver.agent)
    assert due_s == driver.now_s + OUTPUT_WAIT_S

    driver.now_s = due_s
    done = driver.happen(Tick())

    assert done == []


def test_the_output_that_arrived_last_completes_the_failures_record(driver: Driver) -> None:
    driver.happen(exited(0, 1, 3))
    driver.all_exit(-TERM)
    tail = 'Traceback (most recent call last):\n  File "/t.py", line 3, in f\nValueError: late\n'

    driver.happen(Cleared(0, {1: tail, 0: "other"}))

    (record,) = driver.snapshot.failures[0]
    assert (record.exception, record.tail) == ("ValueError", tail)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(-KILL, FailureKind.SIGNAL), (-TERM, FailureKind.EXCEPTION)],
    ids=["killed", "had raised when our SIGTERM ended it"],
)
def test_a_peers_death_found_while_stopping_is_blamed_instead_of_the_one_that_reported_it(
    driver: Driver, code: int, kind: FailureKind
) -> None:
    driver.loses_peer(0)
    driver.exits(1, code, kind)
    driver.exits(2, -TERM, FailureKind.SIGNAL)

    driver.happen(cleared(0))

    (record,) = driver.snapshot.failures[0]
    assert (record.rank, record.code, record.kind) == (1, code, kind)
    assert driver.logged == f"the cause: {record.sentence}"


def test_who_ended_well_while_another_generation_was_opened_runs_again_and_is_not_done(driver: Driver) -> None:
    driver.all_exit()
    driver.sees(1)

    driver.happen(cleared(0))

    assert not driver.snapshot.done
    assert driver.node_id in driver.snapshot.joined[1]


def test_a_pipe_without_a_reader_ends_the_job_by_sigterm_without_a_line_and_with_141(driver: Driver) -> None:
    done = driver.happen(Signalled(PIPE, "SIGPIPE"))
    ends(driver, -TERM)

    assert SignalWorkers(0, ALL, TERM) in done
    assert not [action for action in done if isinstance(action, Log)]
    assert driver.outcome.exit_code == 141
    assert driver.snapshot.ended, "the other nodes end, too"


@pytest.mark.parametrize("progressed", [False, True])
def test_who_joins_again_reports_whether_its_workers_made_progress(driver: Driver, progressed: bool) -> None:
    driver.happen(lost(0, workers_too=True))

    done = driver.happen(cleared(0, progressed=progressed)) + driver.settle()

    assert isinstance(done[0], Join)
    assert done[0].progressed is progressed


def test_killed_workers_get_no_other_signal_when_the_node_is_to_leave(driver: Driver) -> None:
    driver.exits(1, 3)
    driver.after(FAILURE_GRACE_S)

    leaving = driver.happen(Signalled(TERM, "SIGTERM"))

    assert leaving == []
    assert {type(action) for action in driver.acted} == {Commit}
    ends(driver, -KILL, FailureKind.SIGNAL)
    assert driver.outcome.exit_code == 128 + TERM


def test_a_signal_after_the_end_was_written_writes_nothing(driver: Driver) -> None:
    ended = Outcome(OutcomeKind.FAILED, "a person cancelled it", 0, 0, 3)
    driver.write(Put(KEYS.ended, encode(ended)))
    driver.sync()

    driver.happen(Signalled(INT, "SIGINT"))

    assert driver.commits == []
    assert driver.snapshot.ended == ended


@pytest.mark.parametrize(("signum", "name"), [(TERM, "SIGTERM"), (INT, "SIGINT")])
def test_a_ctrl_c_when_only_output_is_left_ends_the_job_and_waits_no_longer(signum: int, name: str) -> None:
    driver = started()
    driver.happen(Signalled(signum, name))
    driver.all_exit(-signum)

    done = driver.happen(Signalled(INT, "SIGINT"))

    assert done == []
    assert driver.outcome.exit_code == 128 + signum
    assert driver.snapshot.ended is not None


def test_a_second_sigterm_is_not_in_a_hurry(driver: Driver) -> None:
    driver.happen(Signalled(TERM, "SIGTERM"))

    assert driver.happen(Signalled(TERM, "SIGTERM")) == []
    assert driver.acted == []


@pytest.mark.parametrize("signums", [(10, TERM), (TERM, 12)])
@pytest.mark.parametrize("live", [True, False], ids=["while the workers stop", "when they are gone"])
def test_of_signals_close_after_each_other_the_first_one_is_named(signums: tuple[int, ...], live: bool) -> None:
    """A scheduler sends SIGUSR1, then SIGTERM at the end of the time, and SIGKILL if that does not help."""
    driver = started()
    driver.agent = replace(driver.agent, spec=replace(SPEC, nodes_max=2))
    first, *later = (Signalled(signum, f"SIG{signum}") for signum in signums)
    driver.happen(first)
    if live:
        for event in later:
            driver.happen(event)
    driver.all_exit(-signums[0])
    if not live:
        for event in later:
            driver.happen(event)
    driver.clear()

    assert driver.outcome.exit_code == 128 + signums[0]
    assert driver.outcome.reason == f"SIG{signums[0]} was received by node-a"


def test_a_signal_after_all_workers_ended_well_comes_too_late(driver: Driver) -> None:
    driver.all_exit()

    assert driver.happen(Signalled(TERM, "SIGTERM")) == []
    driver.clear()

    assert driver.outcome.kind is OutcomeKind.SUCCEEDED


def test_where_the_job_continues_output_is_waited_for_however_long_it_takes(driver: Driver) -> None:
    driver.happen(lost(0, workers_too=True))

    driver.now_s += 1000

    assert deadline_s(driver.agent) is None
    assert driver.happen(Tick()) == []


def test_a_cause_that_was_named_already_is_not_named_again(driver: Driver) -> None:
    driver.exits(1, -KILL, FailureKind.SIGNAL)
    driver.exits(0, 1, FailureKind.PEER_LOST)
    driver.exits(2, -TERM, FailureKind.SIGNAL)

    driver.happen(cleared(0))

    assert not driver.logged


def test_of_two_that_fail_at_once_a_killed_one_is_logged_and_an_exit_code_that_the_first_explains_is_not() -> None:
    driver = started()
    driver.exits(0, -KILL, FailureKind.SIGNAL)

    driver.exits(1, -KILL, FailureKind.SIGNAL)
    second = [action.level for action in driver.acted if isinstance(action, Log)]
    driver.exits(2, 1)

    assert second == ["error"]
    assert not [action for action in driver.acted if isinstance(action, Log)]
