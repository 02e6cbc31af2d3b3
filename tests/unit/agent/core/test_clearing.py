"""agent.core.first_cause: on several nodes the log names first the rank that failed, then those that lost it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Say
from elaunch.agent.core.clearing import WAIT_S
from elaunch.agent.core.events import Tick, WorkerExited
from elaunch.agent.core.state import Running
from elaunch.agent.core.step import deadline_s
from elaunch.rendezvous.types import Failure, FailureKind
from tests.unit.agent.driver import SPEC, START_S, TERM, Driver, cleared, failure, pair, settle

PAIR = "6 workers on 2 nodes"
LOST, RAISED = FailureKind.PEER_LOST, FailureKind.EXCEPTION


def ends(driver: Driver, local_rank: int, code: int, kind: FailureKind) -> Failure:
    """A worker of generation 0 ends. Returns its record."""
    record = replace(failure(0, local_rank, code, kind, driver.agent.me.host), message=f"ended by {kind.value}")
    driver.happen(WorkerExited(0, local_rank, code, record))
    return record


def is_cleared(driver: Driver, *local_ranks: int) -> None:
    """The last workers of generation 0 end by the signal that they got."""
    for local_rank in local_ranks:
        ends(driver, local_rank, -TERM, FailureKind.SIGNAL)
    driver.happen(cleared(0))


def lines(driver: Driver) -> list[str]:
    """The log of generation 0 since its workers ran, without --verbose."""
    said = [each for each in driver.all_acted if isinstance(each, Say) and each.level != "debug"]
    return [each.text for each in said if not each.text.startswith("generation ")]


def starts(driver: Driver) -> list[str]:
    return [a.text for a in driver.all_acted if isinstance(a, Say) and a.text.startswith("generation ")]


def three() -> list[Driver]:
    spec = replace(SPEC, nodes_min=3, nodes_max=3)
    first = Driver(spec, host="node-a").begin()
    nodes = [first, *(Driver(spec, host=host, store=first.store, remote=True).begin() for host in ("node-b", "node-c"))]
    settle(*nodes)
    assert all(isinstance(node.agent.phase, Running) for node in nodes)
    return nodes


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)], ids=["leader", "follower", "followers"])
def test_all_nodes_name_the_rank_that_raised_before_the_one_that_lost_it_and_was_gone_first(
    order: tuple[int, int, int],
) -> None:
    nodes = three()
    survivor, culprit, other = (nodes[place] for place in order)

    lost = ends(survivor, 0, 1, LOST)
    settle(*nodes)
    before = [*lines(survivor), *lines(culprit), *lines(other)]
    raised = ends(culprit, 1, 1, RAISED)
    settle(*nodes)

    assert before == []
    assert lines(survivor) == lines(culprit) == lines(other) == [raised.sentence]
    assert Say(f"{lost.sentence}; stopping 2 others", "debug") in survivor.all_acted


@pytest.mark.parametrize("leads", [True, False])
def test_a_cause_that_was_recorded_beside_the_opening_is_named_when_its_node_is_cleared(leads: bool) -> None:
    survivor, culprit = pair() if leads else pair()[::-1]
    ends(survivor, 0, 1, LOST)
    # Its agent has not seen yet that the next generation is open.
    raised = ends(culprit, 1, 1, RAISED)
    culprit.settle()

    is_cleared(culprit, 0, 2)
    survivor.settle()

    assert lines(survivor) == [raised.sentence]
    assert lines(culprit) == [f"{raised.sentence}; stopping 2 others"]


def test_a_lost_peer_that_nobody_explains_is_named_in_time() -> None:
    survivor, other = pair()
    lost = ends(survivor, 0, 1, LOST)
    settle(survivor, other)
    due_s = deadline_s(survivor.agent)
    for node in (survivor, other):
        node.now_s += WAIT_S
        node.happen(Tick())

    assert due_s == START_S + WAIT_S
    assert lines(survivor)[0] == f"{lost.sentence}; stopping 2 others"
    assert lines(other)[0] == f"stopping: {lost.sentence}"
    assert (survivor.agent.unsaid, other.agent.unsaid) == (None, None)


def test_one_failure_is_one_line_on_each_node_and_one_for_the_restart() -> None:
    culprit, survivor = pair()
    raised = ends(culprit, 1, 1, RAISED)
    # It loses its peer before it sees which node has opened the next generation.
    ends(survivor, 0, 1, LOST)
    settle(culprit, survivor)
    for node, others in ((culprit, (0, 2)), (survivor, (1, 2))):
        for local_rank in others:
            ends(node, local_rank, -TERM, FailureKind.SIGNAL)
        node.happen(replace(cleared(0), hidden="rank 3 lost a peer and ended"))
    settle(culprit, survivor)

    assert lines(culprit) == [f"{raised.sentence}; stopping 2 others"]
    assert lines(survivor) == [raised.sentence]
    for node in (culprit, survivor):
        assert starts(node)[1:] == [f"generation 1: {PAIR} (restart 1 of 3)"]


@pytest.mark.parametrize("is_culprit", [True, False], ids=["its own rank", "another node's"])
def test_the_line_of_the_restart_has_no_cause_that_the_log_has(is_culprit: bool) -> None:
    survivor, culprit = pair()
    ends(survivor, 0, 1, LOST)
    settle(survivor, culprit)
    raised = ends(culprit, 1, 1, RAISED)
    is_cleared(survivor, 1, 2)
    is_cleared(culprit, 0, 2)
    settle(survivor, culprit)

    node = culprit if is_culprit else survivor
    assert lines(node) == [raised.sentence]
    assert starts(node)[1] == f"generation 1: {PAIR} (restart 1 of 3)"
    assert node.snapshot.table
    assert node.snapshot.table.reason == f"restart 1 of 3; the cause: {raised.sentence}"
