"""agent.core.membership: what `elaunch stop` and `elaunch restart` make an agent do."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import SignalWorkers
from elaunch.agent.core.events import RestartOrdered, StoreFailed
from elaunch.agent.core.membership import OrderResponse, order
from elaunch.agent.core.state import Joining, Running, Stopping
from elaunch.rendezvous.rules.queries import Topic
from elaunch.rendezvous.types import OpenKind, OutcomeKind
from tests.unit.agent.driver import ALL, SPEC, TERM, TWO, Driver, ends, pair, settle, started


def ordered(driver: Driver, topic: Topic) -> OrderResponse:
    event, answer = order(driver.agent, topic)
    if event:
        driver.happen(event)
    return answer


def signals(driver: Driver) -> list[tuple[int, frozenset[int]]]:
    return [(each.signum, each.local_ranks) for each in driver.all_acted if isinstance(each, SignalWorkers)]


def test_a_stop_ends_the_job_on_all_nodes_with_sigterm_and_time_to_save() -> None:
    leader, other = pair()

    answer = ordered(leader, Topic.STOP)
    settle(leader, other)

    assert answer.is_done
    for driver in (leader, other):
        phase = driver.agent.phase
        assert isinstance(phase, Stopping)
        assert phase.then
        assert (phase.then.kind, phase.then.exit_code) == (OutcomeKind.INTERRUPTED, 130)
        assert phase.then.reason == "elaunch stop was received by node-a"
        assert phase.grace_s == driver.agent.times.stop_grace_s
        # A shell's background job ignores SIGINT.
        assert signals(driver) == [(TERM, ALL)]


def test_a_restart_opens_a_generation_that_is_not_counted_although_ranks_hang(driver: Driver) -> None:
    answer = ordered(driver, Topic.RESTART)
    driver.settle()
    ends(driver, -TERM)
    driver.settle()

    assert answer == OrderResponse(True, "job job: all workers stop, and start again as generation 1")
    assert signals(driver) == [(TERM, ALL)]
    phase = driver.agent.phase
    assert isinstance(phase, Running)
    assert (phase.table.generation, phase.table.restarts) == (1, 0)
    assert phase.table.reason == "elaunch restart was received by node-a"
    assert driver.generation.kind is OpenKind.RESTART
    # It is no failure for --on-event.
    assert [each.event for each in driver.announcements] == ["restart"]


def test_a_restart_runs_a_finished_node_again() -> None:
    leader, other = pair()
    ends(other)
    settle(leader, other)

    assert ordered(other, Topic.RESTART).is_done
    settle(leader, other)

    assert isinstance(leader.agent.phase, Stopping)
    assert isinstance(other.agent.phase, Joining)


def test_a_restart_is_refused_where_there_is_nothing_to_restart() -> None:
    once, stopped, forming = started(replace(SPEC, max_restarts=0)), started(), started()
    ordered(stopped, Topic.STOP)
    ordered(forming, Topic.RESTART)
    forming.settle()

    logged = [ordered(driver, Topic.RESTART) for driver in (once, stopped, forming)]

    assert logged == [
        OrderResponse(
            False, "it has one generation, since it was started with --max-restarts 0; stop it and start it again"
        ),
        OrderResponse(False, "the job is already ending: elaunch stop was received"),
        OrderResponse(False, "no workers run now: generation 1 is about to start"),
    ]
    assert isinstance(once.agent.phase, Running)


def test_without_the_store_a_stop_is_of_this_node_and_a_restart_is_refused() -> None:
    _, other = pair()
    other.happen(StoreFailed("it does not answer"))

    restart, stop = ordered(other, Topic.RESTART), ordered(other, Topic.STOP)

    assert restart == OrderResponse(False, "the job's store is unreachable, and without it no generation can be opened")
    assert stop.text.startswith("job job stops on this node; the store is unreachable, so stop the other nodes there: ")


def test_a_second_stop_is_answered_and_kills_no_worker(driver: Driver) -> None:
    ordered(driver, Topic.STOP)

    event, answer = order(driver.agent, Topic.STOP)

    assert event is None
    assert answer == OrderResponse(True, "the job is already ending: elaunch stop was received")


def test_a_restart_at_a_spare_is_the_jobs() -> None:
    leader, other = pair()
    spare = Driver(TWO, store=leader.store, host="node-c", remote=True).begin()
    settle(leader, other, spare)

    answer = ordered(spare, Topic.RESTART)
    settle(leader, other, spare)

    assert answer == OrderResponse(True, "job job: all workers stop, and start again as generation 1")
    assert all(isinstance(driver.agent.phase, Stopping) for driver in (leader, other))
    assert order(spare.agent, Topic.RESTART)[1].text == "no workers run now: generation 1 is about to start"
    # It was opened over between the answer and the event.
    assert spare.happen(RestartOrdered()) == []
