"""report_page.history: what the folders of a job tell."""

from __future__ import annotations

import math

import pytest

from elaunch.launcher.report_page.events import read_lines
from elaunch.launcher.report_page.history import NodeFolder, history
from elaunch.launcher.report_page.metrics import StepMetrics
from tests.unit.launcher.report_page.timelines import BEGAN_AT, Timeline, restarted


def test_steps_after_which_a_later_generation_began_are_lost() -> None:
    past = history([restarted().folder()], None)

    assert [(g.first_step, g.last_step, g.kept_step, g.steps_lost) for g in past.generations] == [
        (1, 17, 14, 3),
        (15, 44, 44, 0),
    ]
    assert past.steps_lost == 3
    assert (past.end.outcome, past.end.restarts, past.end.max_restarts, past.wall_s) == ("succeeded", 1, 3, 60)


def test_a_generation_that_reaches_no_step_loses_none_and_hides_no_loss_of_the_one_before() -> None:
    job = Timeline().opens(0, 0).steps(9, 0, 9, first=1).dies(10, 0, 1).stops(11, 0, (0,))
    job.opens(11, 1, "fail").dies(13, 1, 0).stops(14, 1, (1,))
    job.opens(14, 2, "fail").steps(20, 2, 8, first=6).succeeds(30, 2)

    past = history([job.folder()], None)

    assert [generation.steps_lost for generation in past.generations] == [4, 0, 0]


def test_a_script_that_reports_no_step_has_no_steps_to_lose() -> None:
    past = history([Timeline().opens(0, 0).succeeds(9, 0).folder()], None)

    assert past.steps_lost == -1
    assert not past.knows_steps


def test_the_worker_says_when_it_restored_and_the_agent_reads_it_later() -> None:
    generation = history([restarted().folder()], None).generations[1]

    assert (generation.ready_s, generation.trains_s) == (24, 25)


def test_without_marks_the_rate_tells_when_the_first_step_began() -> None:
    job = Timeline().opens(0, 0).steps(10, 0, 3, first=1).steps(20, 0, 23, rate=2.0).succeeds(30, 0)

    # Three steps at two a second before the agent looked.
    assert history([job.folder()], None).generations[0].trains_s == pytest.approx(8.5)


def test_a_job_shorter_than_two_looks_at_its_steps_trained_from_its_fork_on() -> None:
    job = Timeline().opens(0, 0).steps(1.9, 0, 8, first=1).succeeds(3, 0)

    assert history([job.folder()], None).generations[0].trains_s == 1


def test_the_end_of_the_first_step_tells_when_it_began_however_late_the_agent_looked() -> None:
    """Twelve steps of a second; a busy agent saw the first ten at once, and the last two a moment later."""
    job = Timeline().opens(0, 0).says("stepped", 3, 0).steps(12, 0, 10, first=1).steps(14, 0, 12, rate=20.0)

    (generation,) = history([job.succeeds(15, 0).folder()], None).generations

    assert generation.trains_s == pytest.approx(2.0)


def test_ranks_that_begin_at_very_different_times_began_when_the_first_of_them_did() -> None:
    """Rank 0 makes a step a second from 2 s on; rank 1 of the same node, and node-b, load their data much longer."""
    near = Timeline("node-a").opens(0, 0, world_size=4).says("stepped", 3, 0, (0,)).says("stepped", 40, 0, (1,))
    far = Timeline("node-b", 2).opens(0, 0, world_size=4).says("stepped", 70, 0)
    near.steps(4, 0, 2, first=1).steps(80, 0, 78, rate=1.0).succeeds(90, 0)
    far.steps(71, 0, 1, first=1).steps(80, 0, 11, rate=1.0).succeeds(90, 0)

    for folders in ([near.folder(), far.folder()], [far.folder(), near.folder()]):
        assert history(folders, None).generations[0].trains_s == pytest.approx(2.0)
    # The first node may be the late one.
    late = Timeline("node-a").opens(0, 0, world_size=4).says("stepped", 70, 0).steps(71, 0, 1, first=1).succeeds(90, 0)
    early = Timeline("node-b", 2).opens(0, 0, world_size=4).says("stepped", 3, 0).steps(80, 0, 78, first=1)
    assert history([late.folder(), early.succeeds(90, 0).folder()], None).generations[0].trains_s == pytest.approx(2.0)


@pytest.mark.parametrize(("ahead_s", "began_s"), [(-3600.0, 4.0), (1.9, 4.0), (-1.9, 4.0 + 1.9), (3600.0, 4.0)])
def test_a_second_nodes_clock_does_not_move_the_first_step(ahead_s: float, began_s: float) -> None:
    """Times count from the first event: a clock that is a little behind has its first event before the job's."""
    jobs = [Timeline("node-a"), Timeline("node-b", 2, ahead_s=ahead_s)]
    for job in jobs:
        job.opens(0, 0, world_size=4).says("stepped", 5, 0).steps(6, 0, 2, first=1).steps(16, 0, 12, rate=1.0)

    (generation,) = history([job.succeeds(20, 0).folder() for job in jobs], None).generations

    assert generation.trains_s == pytest.approx(began_s)


def test_two_nodes_are_one_job_and_a_wrong_clock_is_corrected_and_told() -> None:
    near = Timeline("node-a").opens(0, 0, world_size=4).dies(10, 0, 1)
    far = Timeline("node-b", 2, started_s=0.1, ahead_s=3600).opens(0, 0, world_size=4)

    past = history([far.folder(), near.folder()], None)

    assert [node.host for node in past.nodes] == ["node-a", "node-b"]
    assert past.began_at == BEGAN_AT
    assert past.nodes[1].events[0][0] == pytest.approx(0.1)
    assert past.generations[0].world_size == 4
    assert any("node-b's clock was 3600.0 s ahead of node-a's" in remark for remark in past.remarks)


def test_small_differences_of_clocks_are_left_alone() -> None:
    far = Timeline("node-b", 2, ahead_s=1.0).opens(0, 0)

    past = history([Timeline().opens(0, 0).folder(), far.folder()], None)

    assert past.nodes[1].events[0][0] == pytest.approx(1.0)
    assert not any("clock" in remark for remark in past.remarks)


def test_a_job_without_an_end_is_told_as_one_and_shown_up_to_its_last_event() -> None:
    past = history([Timeline().opens(0, 0).steps(33, 0, 5, first=1).folder()], None)

    assert (past.end.outcome, past.wall_s) == ("", 33)
    assert any("No node says how the job ended" in remark for remark in past.remarks)


def test_the_node_that_knows_the_end_tells_it() -> None:
    gone = Timeline("node-b", 2).opens(0, 0).add(50, 0, "ended", outcome="unknown", code=3, reason="the store is away")
    past = history([restarted().folder(), gone.folder()], None)

    assert past.end.outcome == "succeeded"


def test_a_timeline_of_an_older_release_gives_what_it_can_and_says_what_is_missing() -> None:
    old = Timeline(schema=0).add(0, 0, "opened", kind="start").add(0.5, 0, "sealed", world_size=2)
    for local_rank in (0, 1):
        old.add(1, 0, "forked", rank=local_rank, local_rank=local_rank, pid=local_rank)
    old.add(5, 0, "exited", rank=1, local_rank=1, pid=1, code=-9).add(5, 0, "killing", signal="SIGKILL", workers=1)
    old.add(5.1, 0, "exited", rank=0, local_rank=0, pid=0, code=-9).add(6, 1, "opened", kind="fail")
    old.add(9, 1, "ended", outcome="failed", code=1)

    past = history([old.folder("/logs/night_0a1b2c3d")], None)

    # The one that was killed by its agent is no failure.
    assert [(fault.rank, fault.is_cause) for fault in past.faults] == [(1, True)]
    assert "rank 1 (local rank 1 on this node, pid 1) was killed by SIGKILL in generation 0" in past.faults[0].sentence
    assert (past.run_id, past.end.outcome, past.end.restarts) == ("night", "failed", 1)
    assert any("older elaunch" in remark for remark in past.remarks)


def test_of_an_older_timeline_the_death_ends_the_training_and_not_the_worker_that_was_done_before() -> None:
    old = Timeline(schema=0)
    for local_rank in (0, 1):
        old.add(1, 0, "forked", rank=local_rank, local_rank=local_rank, pid=local_rank)
    old.add(5, 0, "exited", rank=0, local_rank=0, pid=0, code=0).add(
        9, 0, "exited", rank=1, local_rank=1, pid=1, code=3
    )

    assert history([old.folder()], None).generations[0].noted_s == 9


def test_a_newer_schema_is_read_and_told() -> None:
    past = history([Timeline(schema=7).opens(0, 0).succeeds(5, 0).folder()], None)

    assert past.end.outcome == "succeeded"
    assert any("newer elaunch (schema 7)" in remark for remark in past.remarks)


def test_a_torn_last_line_and_broken_lines_cost_only_themselves() -> None:
    text = restarted().text + b'not json\n{"generation": 1}\n{"generation": 1, "eve'
    folder = NodeFolder("/logs/a", "a", "night", read_lines(text.splitlines(keepends=True)))

    past = history([folder], None)

    assert past.end.outcome == "succeeded"
    assert any("2 lines of node-a's timeline" in remark for remark in past.remarks)
    assert any("The last line of node-a's timeline is cut" in remark for remark in past.remarks)


def test_the_newest_words_about_a_failure_are_kept_and_the_verdict_names_the_cause() -> None:
    job = Timeline().opens(0, 0)
    job.dies(10, 0, 0, code=1)
    job.dies(10.1, 0, 1)
    known = {"rank": 1, "local_rank": 1, "pid": 1, "host": "node-a", "kind": "out of memory", "message": "m"}
    job.add(10.4, 0, "cause", **known, sentence="rank 1 was killed by the OOM killer", advice="give it more memory")
    job.add(11, 1, "restarting", kind="fail", failure={**known, "sentence": "rank 1 was killed by the OOM killer"})
    job.opens(11, 1, "fail").succeeds(20, 1)

    cause, other = history([job.folder()], None).faults

    assert (cause.rank, cause.is_cause, cause.advice) == (1, True, "give it more memory")
    assert cause.sentence == "rank 1 was killed by the OOM killer"
    assert cause.at_s == pytest.approx(10.1)
    assert (other.rank, other.is_cause) == (0, False)


def test_without_a_verdict_a_failure_that_another_explains_is_not_the_cause() -> None:
    job = Timeline().opens(0, 0).dies(10, 0, 0, code=1).dies(11, 0, 1, code=1)
    job.rows[-3]["kind"] = "peer lost"

    past = history([job.folder()], None)

    assert [(fault.rank, fault.is_cause) for fault in past.faults] == [(1, True), (0, False)]


def test_metrics_of_an_older_run_in_the_same_file_are_not_this_runs() -> None:
    job = Timeline().opens(0, 0).steps(9, 0, 105, first=101).succeeds(20, 0)
    row = b'{"step": %d, "seconds": 1, "generation": 0, "at": %f}'
    rows = [row % (step, BEGAN_AT - 900 + step) for step in range(1, 101)]
    rows += [row % (100 + step, BEGAN_AT + 3 + step) for step in range(1, 7)]

    generation = history([job.folder()], StepMetrics().add_all(rows)).generations[0]

    assert (generation.first_step, generation.last_step) == (101, 106)
    assert generation.trained_s == pytest.approx(6)
    assert generation.ends_s == pytest.approx(9)
    assert math.isfinite(generation.trains_s)
