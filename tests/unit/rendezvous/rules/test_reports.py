"""rendezvous.rules.reports: the state of a job, and its newest failure, from the keys in the store."""

from __future__ import annotations

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.reports import JobState, job_report
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import FailureKind, Outcome, OutcomeKind
from tests.unit.agent.job_world import KEYS, A, B, forming, running


def test_a_job_runs_forms_ends_or_has_no_members() -> None:
    world, abandoned = running(A, B), running(A, B)
    states = [job_report(world.snapshot).state, job_report(forming(A, B).snapshot).state]
    world.write(Put(KEYS.ended, encode(Outcome(OutcomeKind.SUCCEEDED, "every worker exited with 0", 0, 0, 3))))
    abandoned.lose(A, B)

    states += [job_report(each.snapshot).state for each in (world, abandoned)]

    assert states == [JobState.RUNNING, JobState.FORMING, JobState.ENDED, JobState.GONE]


def test_the_failure_that_is_shown_is_of_the_newest_generation_that_failed_or_of_the_outcome() -> None:
    world = running(A, B)
    world.fail(FailureKind.SIGNAL, nodes=(B,))
    world.run(A, B)
    world.fail(FailureKind.EXCEPTION, nodes=(A,))
    newest = job_report(world.snapshot).failure
    first = world.snapshot.failures[0][0]
    world.write(Put(KEYS.ended, encode(Outcome(OutcomeKind.FAILED, "the budget is spent", 1, 1, 1, first))))

    assert newest
    assert (newest.generation, newest.kind) == (1, FailureKind.EXCEPTION)
    assert job_report(world.snapshot).failure == first.opening
