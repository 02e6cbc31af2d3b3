"""report_page.ending: how a job ended, or whether it runs."""

from __future__ import annotations

import pytest

from elaunch.launcher.report_page.ending import Life, Look
from elaunch.launcher.report_page.goodput import Stage, goodput
from elaunch.launcher.report_page.history import History, history
from elaunch.launcher.report_page.lanes import lanes_of
from elaunch.launcher.report_page.metrics import StepMetrics
from elaunch.launcher.report_page.page import headline, make_page, summary
from tests.unit.launcher.report_page.timelines import BEGAN_AT, Timeline

PID = 4711


def job(host: str = "node-a", first_rank: int = 0, ahead_s: float = 0.0) -> Timeline:
    """Its newest event is at 20 s."""
    made = Timeline(host, first_rank, ahead_s=ahead_s).opens(0, 0, world_size=2).steps(4.5, 0, 1, first=1)
    made.rows[0]["pid"] = PID
    return made.steps(20, 0, 16, rate=1.0)


def look(at_s: float, host: str = "", *agents: tuple[str, int]) -> Look:
    return Look(BEGAN_AT + at_s, host, frozenset(agents))


def past(*jobs: Timeline, seen: Look | None = None, metrics: StepMetrics | None = None) -> History:
    return history([each.folder() for each in jobs], metrics, seen)


def said(of: History) -> str:
    return headline(of, goodput(of))


def test_a_job_whose_agent_answers_runs_and_is_shown_up_to_now() -> None:
    found = past(job(), seen=look(3600, "node-a", ("night", PID)))

    assert (found.end.life, found.wall_s, found.end.silent_s) == (Life.RUNS, 3600, 3580)
    assert said(found) == "Job night has been running for 1 h 00 min: no restart, 0 steps lost."
    assert any("its agent answers" in remark for remark in found.remarks)
    # Its ranks train up to now, and so does the job.
    parts = goodput(found)
    assert all(lane.bars[-1].end_s == 3600 for lane in lanes_of(found, parts).shown)
    assert parts.seconds(Stage.TRAINING) == pytest.approx(3600 - 3.5)
    assert summary(make_page(found, parts, None, {}, {}))["state"] == "running"


def test_an_agent_of_another_job_or_with_another_pid_is_not_this_jobs() -> None:
    for agent in (("other", PID), ("night", PID + 1)):
        assert past(job(), seen=look(3600, "node-a", agent)).end.life is Life.UNKNOWN
    # Another host has such a pid too.
    assert past(job("node-b"), seen=look(3600, "node-a", ("night", PID))).end.life is Life.UNKNOWN


def test_a_job_of_other_hosts_with_a_young_event_seems_to_run() -> None:
    found = past(job(), seen=look(50, "login-node"))

    assert (found.end.life, found.wall_s) == (Life.SEEMS_TO_RUN, 50)
    assert said(found) == "Job night seems to be running, for 50.0 s by now: no restart, 0 steps lost."
    assert any("its newest event was 30.0 s old" in remark for remark in found.remarks)


def test_a_job_with_an_old_event_may_run_or_not_and_is_shown_up_to_that_event() -> None:
    found = past(job(), seen=look(500, "login-node"))

    assert (found.end.life, found.wall_s) == (Life.UNKNOWN, 20)
    assert said(found).startswith("Job night has no end in its log, which stops 20.0 s after the start")
    assert any("newest event, which was 8 min 00 s old" in remark for remark in found.remarks)


def test_a_job_whose_agents_all_ran_here_and_do_not_answer_does_not_seem_to_run() -> None:
    assert past(job(), seen=look(25, "node-a")).end.life is Life.UNKNOWN
    # The other node's agent may live.
    assert past(job(), job("node-b", 2), seen=look(25, "node-a")).end.life is Life.SEEMS_TO_RUN


def test_a_job_that_said_its_end_has_ended_however_young_that_is() -> None:
    found = past(job().succeeds(30, 0), seen=look(31, "node-a", ("night", PID)))

    assert (found.end.life, found.end.outcome, found.wall_s) == (Life.ENDED, "succeeded", 30)


def test_now_is_counted_on_the_clock_of_the_node_that_answers() -> None:
    """The page is made on node-b, whose clock is an hour ahead."""
    jobs = job(), job("node-b", 2, ahead_s=3600)

    found = past(*jobs, seen=look(3600 + 100, "node-b", ("night", PID)))

    assert (found.end.life, found.wall_s) == (Life.RUNS, pytest.approx(100))


def test_a_node_that_left_ends_no_job_that_went_on() -> None:
    left = job("node-b", 2).add(25, 0, "ended", outcome="interrupted", code=143, reason="it got SIGTERM")

    # The other node's log goes on; or its agent answers; or it tells the job's end.
    assert past(job().steps(60, 0, 50), left).end.outcome == ""
    assert past(job(), left, seen=look(60, "node-a", ("night", PID))).end.life is Life.RUNS
    assert past(job().succeeds(99, 0), left).end.outcome == "succeeded"
    # All have left.
    assert past(job().add(25, 0, "ended", outcome="interrupted", code=143), left).end.outcome == "interrupted"


def test_a_job_whose_agent_was_killed_says_so_unless_others_went_on_or_are_not_known() -> None:
    reason = "elaunch itself (pid 7) died on node-b in generation 0, by kill -9; its 2 workers there were ended"

    def killed(at_s: float) -> Timeline:
        return job("node-b", 2).add(at_s, 0, "agent_died", reason=reason)

    alone = past(killed(25))
    assert (alone.end.outcome, alone.end.reason, alone.end.life) == ("killed", reason, Life.ENDED)
    since = "since elaunch itself (pid 7) died on node-b in generation 0"
    assert said(alone) == f"Job night ended after 25.0 s, {since}: no restart, 0 steps lost."
    # The other node went on; it said how the job ended; its log is not here.
    assert past(job().steps(60, 0, 50), killed(25)).end.life is Life.UNKNOWN
    assert past(job().succeeds(99, 0), killed(25)).end.outcome == "succeeded"
    beside = past(killed(25).add(21, 0, "sealed", nodes=[{}, {}]))
    assert (beside.end.life, reason in beside.remarks) == (Life.UNKNOWN, True)


def test_the_step_on_its_way_is_training_and_no_end() -> None:
    """The trainer's file has a step of 1 s at 20 s; the next one has not been written 5 s later."""
    row = b'{"step": %d, "seconds": 1, "generation": 0, "at": %f}'
    metrics = StepMetrics().add_all(row % (step, BEGAN_AT + 4 + step) for step in range(1, 17))

    found = goodput(past(job(), seen=look(25, "node-a", ("night", PID)), metrics=metrics))

    assert found.seconds(Stage.END) == found.seconds(Stage.LOST) == 0
    assert found.parts[-1].stage is Stage.TRAINING
    assert found.parts[-1].end_s == 25
