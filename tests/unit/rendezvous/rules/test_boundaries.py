"""Rules of rendezvous.rules that only a case at their edge shows."""

from __future__ import annotations

from dataclasses import replace

from elaunch.rendezvous.rules.assign_ranks import seat
from elaunch.rendezvous.rules.excluding import stand
from elaunch.rendezvous.rules.reports import job_report
from elaunch.rendezvous.types import Exclusion, Failure, FailureKind
from tests.unit.agent.job_world import node
from tests.unit.rendezvous.rules.test_excluding import TWO, A, B, C, failing, three


def test_a_free_seat_that_nobody_has_had_is_for_a_node_of_any_role() -> None:
    assert seat(None, [node("a")], 2).has_seat_for(replace(node("b"), role="ps"))
    assert not seat(None, [node("a")], 1).has_seat_for(node("b"))


def test_an_excluded_node_that_runs_for_want_of_another_is_not_acquitted_by_its_own_failure() -> None:
    own, other = Exclusion("host-b", "signal", ""), Exclusion("host-c", "signal", "")
    before = replace(three().table, excluded=(own, other))
    failed = Failure(FailureKind.SIGNAL, before.generation, B.node_id, B.host, 1, 0, 1, 1, "was killed by SIGKILL")

    found = stand(TWO, before, [failed], {B.node_id, C.node_id}, 1.0)

    assert found.excluded == (own,)


def test_the_failure_that_is_shown_is_of_the_newest_generation_that_failed() -> None:
    world = failing(three(), B)
    world.fail(FailureKind.EXCEPTION, nodes=(A,))

    assert sorted(world.snapshot.failures) == [0, 1]
    found = job_report(world.snapshot).failure
    assert found
    assert (found.generation, found.kind) == (1, FailureKind.EXCEPTION)
