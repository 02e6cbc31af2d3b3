"""inspect.history and .goodput: what the timelines of a job's nodes mean."""

from __future__ import annotations

import math

import pytest

from elaunch.launcher.inspect.history import Goodput, History, Stage, goodput, history
from elaunch.launcher.inspect.node_log import node_log
from tests.unit.launcher.inspect.timelines import BEGAN_AT, Timeline, restarted

MESSAGE = "it runs in wait (train.py:12), while ranks 0, 2, 3 wait in all_reduce, for 61 s"


def past(*jobs: Timeline) -> History:
    return history([job.log() for job in jobs])


def of(*jobs: Timeline) -> Goodput:
    return goodput(past(*jobs))


def test_each_stage_of_a_restart_has_its_time() -> None:
    found = of(restarted())

    # The first step began one step before the first worker had completed it. 3 of 17 steps are lost.
    window_s = 20 - 3
    expected = {
        Stage.START_UP: 3,
        Stage.TRAINING: window_s * 14 / 17 + (59 - 25),
        Stage.LOST: window_s * 3 / 17,
        Stage.DETECTION: 0.25,
        Stage.STOP: 0.75,
        Stage.RENDEZVOUS: 0.5,
        Stage.SPAWN: 2.5,
        Stage.RESTORE: 1.0,
        Stage.END: 1.0,
    }
    assert {stage: time for stage, time in found.seconds.items() if time} == pytest.approx(expected)
    assert found.ettr == pytest.approx(expected[Stage.TRAINING] / 60)
    # From the death at 20 s to the first step at 25 s.
    assert found.recoveries_s == {0: pytest.approx(5)}


def test_the_time_of_a_generation_counts_once_for_each_of_its_workers() -> None:
    job = Timeline().opens(0, 0, world_size=2).steps(9, 0, 9, first=1).dies(10, 0, 1).stops(11, 0, (0,))
    job.opens(11, 1, "join", world_size=8).says("stepped", 20, 1).steps(21, 1, 10, first=10).succeeds(30, 1)

    found = of(job)

    of_two = (Stage.START_UP, Stage.DETECTION, Stage.STOP)
    lost = {s: time for s, time in found.seconds.items() if s not in (Stage.TRAINING, Stage.END)}
    assert 3600 * found.lost_h == pytest.approx(sum((2 if s in of_two else 8) * time for s, time in lost.items()))
    assert sum(found.seconds[s] > 0 for s in of_two) == 3
    assert 2 * found.seconds[Stage.TRAINING] < 3600 * found.used_h < 8 * found.seconds[Stage.TRAINING]


def test_a_hang_is_detection_and_not_training() -> None:
    job = Timeline().opens(0, 0).says("stepped", 3, 0).steps(4, 0, 2, first=1).steps(10, 0, 8)
    failure = {"kind": "hang", "sentence": "rank 1 hangs", "host": "node-a", "rank": 1, "local_rank": 1, "pid": 1}
    job.add(40, 0, "hung", quiet_s=30).add(40.5, 0, "failed", **failure, failed_at=BEGAN_AT + 40).stops(42, 0, (0, 1))
    job.opens(42, 1, "fail").steps(45, 1, 9, first=9).steps(50, 1, 14).succeeds(60, 1)

    assert of(job).seconds[Stage.DETECTION] == pytest.approx(30.5)


def test_a_job_that_never_trained_again_did_not_recover() -> None:
    ended = Timeline().opens(0, 0).steps(4.5, 0, 0, first=0).dies(10, 0, 1)
    ended.add(10.3, 1, "opened", kind="fail", cause="rank 1 died")
    ended.add(11, 1, "ended", outcome="failed", code=1, reason="no restart is left")
    loop = Timeline().opens(0, 0).steps(6, 0, 2, first=1).dies(16, 0, 0).stops(18, 0, (1,))
    for number in (1, 2):
        loop.opens(20 * number, number, "fail").dies(20 * number + 5, number, 0).stops(20 * number + 8, number, (1,))

    blind = Timeline().opens(0, 0).dies(10, 0, 1).stops(11, 0, (0,)).add(10.3, 1, "opened", kind="fail")
    blind.add(12, 1, "ended", outcome="failed", code=1, reason="no restart is left")

    assert of(ended).recoveries_s == of(loop).recoveries_s == of(blind).recoveries_s == {}


def test_steps_after_which_a_later_generation_began_are_lost() -> None:
    found = past(restarted())
    # One that reaches no step loses none, and hides no loss of the one before.
    job = Timeline().opens(0, 0).steps(9, 0, 9, first=1).dies(10, 0, 1).stops(11, 0, (0,))
    job.opens(11, 1, "fail").dies(13, 1, 0).stops(14, 1, (1,))
    job.opens(14, 2, "fail").steps(20, 2, 8, first=6).succeeds(30, 2)

    assert [(g.first_step, g.last_step, g.kept_step, g.steps_lost) for g in found.generations] == [
        (1, 17, 14, 3),
        (15, 44, 44, 0),
    ]
    assert (found.end.outcome, found.end.restarts, found.end.max_restarts, found.wall_s) == ("succeeded", 1, 3, 60)
    assert (found.generations[1].ready_s, found.generations[1].trains_s) == pytest.approx((24, 25))
    assert [generation.steps_lost for generation in past(job).generations] == [4, 0, 0]


def test_broken_lines_cost_only_themselves() -> None:
    text = restarted().text + b'not json\n{"generation": 1}\n{"generation": 1, "eve'

    found = history([node_log("/logs/a", text.splitlines(keepends=True))])

    assert found.end.outcome == "succeeded"
    assert any("2 lines of node-a's timeline" in remark for remark in found.remarks)


def test_the_newest_record_of_a_failure_is_kept_and_the_verdict_names_the_cause() -> None:
    job = Timeline().opens(0, 0).dies(10, 0, 0, code=1).dies(10.1, 0, 1)
    known = {"rank": 1, "local_rank": 1, "pid": 1, "host": "node-a", "kind": "out of memory", "message": "m"}
    job.add(10.4, 0, "cause", **known, sentence="rank 1 was killed by the OOM killer", advice="give it more memory")
    job.add(11, 1, "restarting", kind="fail", failure={**known, "sentence": "rank 1 was killed by the OOM killer"})

    cause, other = past(job.opens(11, 1, "fail").succeeds(20, 1)).faults

    assert (cause.rank, cause.is_cause, cause.advice) == (1, True, "give it more memory")
    assert cause.sentence == "rank 1 was killed by the OOM killer"
    assert cause.at_s == pytest.approx(10.1)
    assert (other.rank, other.is_cause) == (0, False)


def test_without_a_verdict_a_failure_that_another_explains_is_not_the_cause() -> None:
    job = Timeline().opens(0, 0).dies(10, 0, 0, code=1).dies(11, 0, 1, code=1)
    job.rows[-3]["kind"] = "peer lost"

    assert [(fault.rank, fault.is_cause) for fault in past(job).faults] == [(1, True), (0, False)]


def two_nodes(*, resumes: bool = True) -> list[Timeline]:
    """Both nodes report the hang of rank 3, on node-b, which may end by itself."""
    jobs = [Timeline("node-a").opens(0, 0, world_size=4), Timeline("node-b", 2).opens(0, 0, world_size=4)]
    for number, job in enumerate(jobs):
        job.add(70 + number / 10, 0, "seems_hung", host="node-b", rank=3, message=MESSAGE)
        if resumes:
            job.add(90 + number / 10, 0, "goes_on")
    return jobs


def test_a_hang_is_reported_once_with_its_rank_and_host_and_when_the_job_resumed() -> None:
    jobs = two_nodes()
    for job in jobs:
        job.add(290, 0, "seems_hung", host="node-b", rank=3, message=MESSAGE)

    first, second = past(*jobs).warned

    assert (first.rank, first.local_rank, first.host, first.folder) == (3, 1, "node-b", "/logs/node-b")
    assert (first.at_s, first.until_s) == (pytest.approx(70), pytest.approx(90))
    assert first.sentence == f"the job seemed to hang: rank 3 on node-b {MESSAGE.removeprefix('it ')}"
    assert second.at_s == pytest.approx(290)
    assert math.isnan(second.until_s)


def test_a_hang_that_became_a_failure_is_among_the_failures_alone() -> None:
    jobs = two_nodes(resumes=False)
    failure = {"kind": "hang", "sentence": "rank 3 hangs", "host": "node-b", "rank": 3, "local_rank": 1, "pid": 1}
    jobs[1].add(71, 0, "failed", **failure, failed_at=BEGAN_AT + 71).stops(72, 0, (0, 1))

    assert past(*jobs).warned == ()
    assert [fault.sentence for fault in past(*jobs).faults] == ["rank 3 hangs"]


def running_job(host: str = "node-a", first_rank: int = 0) -> Timeline:
    """Its newest event is at 20 s."""
    return Timeline(host, first_rank).opens(0, 0, world_size=2).steps(4.5, 0, 1, first=1).steps(20, 0, 16)


def test_a_job_without_an_end_is_shown_up_to_its_newest_event() -> None:
    found = past(running_job("node-b", 2), running_job())

    assert (found.end.outcome, found.wall_s) == ("", 20)
    assert [node.host for node in found.nodes] == ["node-a", "node-b"]
    assert any("No node recorded how the job ended" in remark for remark in found.remarks)


def test_a_node_that_left_ends_no_job_that_continued() -> None:
    left = running_job("node-b", 2).add(25, 0, "ended", outcome="interrupted", code=143, reason="it got SIGTERM")

    # The other node's log continues, or it recorded the job's end.
    assert past(running_job().steps(60, 0, 50), left).end.outcome == ""
    assert past(running_job().succeeds(99, 0), left).end.outcome == "succeeded"
    # All have left.
    ended = running_job().add(25, 0, "ended", outcome="interrupted", code=143)
    assert past(ended, left).end.outcome == "interrupted"


def test_a_job_whose_agent_was_killed_ended_so_unless_others_continued_or_are_not_known() -> None:
    reason = "elaunch itself (pid 7) died on node-b in generation 0, by kill -9; its 2 workers there were ended"

    def killed(at_s: float) -> Timeline:
        return running_job("node-b", 2).add(at_s, 0, "agent_died", reason=reason)

    alone = past(killed(25))
    assert (alone.end.outcome, alone.end.reason) == ("killed", reason)
    # The other node continued; it recorded how the job ended; its log is not here.
    assert past(running_job().steps(60, 0, 50), killed(25)).end.outcome == ""
    assert past(running_job().succeeds(99, 0), killed(25)).end.outcome == "succeeded"
    beside = past(killed(25).add(21, 0, "sealed", nodes=[{}, {}]))
    assert (beside.end.outcome, reason in beside.remarks) == ("", True)
