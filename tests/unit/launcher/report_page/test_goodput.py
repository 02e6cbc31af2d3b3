"""report_page.goodput: where the time of a job went."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from elaunch.launcher.report_page.goodput import Goodput, Stage, goodput
from elaunch.launcher.report_page.history import history
from elaunch.launcher.report_page.metrics import StepMetrics
from tests.unit.launcher.report_page.timelines import BEGAN_AT, Timeline, restarted


def of(*jobs: Timeline, metrics: StepMetrics | None = None) -> Goodput:
    return goodput(history([job.folder() for job in jobs], metrics))


def test_every_moment_of_a_job_is_in_one_stage() -> None:
    found = of(restarted())

    assert found.parts[0].begin_s == 0
    assert found.parts[-1].end_s == found.wall_s == 60
    assert all(one.end_s == other.begin_s for one, other in pairwise(found.parts))
    assert sum(map(found.seconds, Stage)) == pytest.approx(60)


def test_each_stage_of_a_restart_has_its_time() -> None:
    found = of(restarted())

    times = {stage: found.seconds(stage) for stage in Stage if found.seconds(stage)}
    # Its first step began at 3.5 s: at 4.5 s the agent saw one step, at one a second. 3 of 17 steps are lost.
    window_s = 20 - 3.5
    expected = {
        Stage.START_UP: 3.5,
        Stage.TRAINING: window_s * 14 / 17 + (59 - 25),
        Stage.LOST: window_s * 3 / 17,
        Stage.DETECTION: 0.25,
        Stage.STOP: 0.75,
        Stage.RENDEZVOUS: 0.5,
        Stage.SPAWN: 2.5,
        Stage.RESTORE: 1.0,
        Stage.END: 1.0,
    }
    assert times == pytest.approx(expected)
    assert found.ettr == pytest.approx(expected[Stage.TRAINING] / 60)


def test_what_a_failure_cost_is_its_lost_work_and_the_time_until_the_next_step() -> None:
    found = of(restarted())

    cost = found.cost(0)

    assert [part.stage for part in cost] == [
        Stage.LOST,
        Stage.DETECTION,
        Stage.STOP,
        Stage.RENDEZVOUS,
        Stage.SPAWN,
        Stage.RESTORE,
    ]
    # From the death at 20 s to the first step at 25 s.
    assert found.recoveries_s == {0: pytest.approx(5)}
    assert found.recovery_s == pytest.approx(5)
    # Nothing came after the last.
    assert found.cost(1) == ()


def test_metrics_tell_the_time_of_the_steps_that_count() -> None:
    rows = [
        b'{"step": %d, "seconds": 0.5, "generation": 0, "at": %f}' % (s, BEGAN_AT + 4 + s / 2) for s in range(1, 21)
    ]
    job = Timeline().opens(0, 0).steps(5, 0, 2, first=1).steps(14, 0, 20, rate=2.0).succeeds(20, 0)

    found = of(job, metrics=StepMetrics().add_all(rows))

    assert found.seconds(Stage.TRAINING) == pytest.approx(10)
    # After the last step, at 14 s, no more is trained.
    assert found.seconds(Stage.END) == pytest.approx(6)
    assert found.ettr == pytest.approx(0.5)


def test_a_hang_is_detection_and_not_training() -> None:
    job = Timeline().opens(0, 0).steps(4, 0, 2, first=1).steps(10, 0, 8, rate=1.0).add(40, 0, "hung", quiet_s=30)
    said = {"kind": "hang", "sentence": "rank 1 hangs", "host": "node-a", "rank": 1, "local_rank": 1, "pid": 1}
    job.add(40.5, 0, "failed", **said, failed_at=BEGAN_AT + 40).stops(42, 0, (0, 1))
    job.opens(42, 1, "fail").steps(45, 1, 9, first=9).steps(50, 1, 14, rate=1.0).succeeds(60, 1)

    found = of(job)

    assert found.seconds(Stage.DETECTION) == pytest.approx(30.5)


def test_a_job_that_never_trained_spent_all_its_time_on_starting() -> None:
    job = Timeline().opens(0, 0).dies(2, 0, 1, code=1).stops(3, 0, (0,))
    job.add(4, 0, "ended", outcome="failed", code=1, reason="import error", restarts=0, max_restarts=3)

    found = of(job)

    assert math.isnan(found.ettr)
    assert found.seconds(Stage.RUNNING) == pytest.approx(1)
    assert found.seconds(Stage.TRAINING) == 0


def test_a_script_without_steps_has_no_ettr_but_the_time_its_workers_ran() -> None:
    job = Timeline().opens(0, 0).dies(11, 0, 1).stops(12, 0, (0,)).opens(12, 1, "fail").succeeds(30, 1)

    found = of(job)

    assert math.isnan(found.ettr)
    assert found.seconds(Stage.RUNNING) == pytest.approx(10 + 16)
    assert sum(map(found.seconds, Stage)) == pytest.approx(30)


def test_a_generation_that_only_the_jobs_end_has_opened_is_no_recovery() -> None:
    job = Timeline().opens(0, 0).steps(4.5, 0, 0, first=0, rate=1.0).dies(10, 0, 1)
    job.add(10.3, 1, "opened", kind="fail", cause="rank 1 died")
    job.add(11, 1, "ended", outcome="failed", code=1, reason="no restart is left")
    past = history([job.folder()], None)

    assert past.last_that_ran == 0
    assert math.isnan(goodput(past).recovery_s)
