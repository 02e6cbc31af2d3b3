"""Profiled steps in which a worker is killed, or the disk is full: they cost the trace and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.faults.test_trainer_disk import fill, small_disk
from tests.faults.trainings import CalmTrainings, OneNode


@pytest.mark.slow
def test_a_worker_killed_in_a_profiled_step_costs_the_trace_and_no_step_and_the_restart_profiles_what_is_left(
    tmp_path: Path, calm_training: CalmTrainings
) -> None:
    asks = ["backward-0-11-1"]
    with OneNode(tmp_path / "run", 2, "--profile", "10-14", asks=asks, launch="--log-dir logs") as run:
        run.ended()

    assert run.struck() == asks
    run.assert_complete()
    run.assert_same(calm_training(2))
    assert re.search(r"this start begins with step 11; left of steps 10 to 14: steps 12 to 14", run.job.output)
    places = [*(run.folder / "logs").glob("*/attempt_*/profile/profile.json")]
    assert [place.parent.parent.name for place in places if place.parts[-4] != "latest"] == ["attempt_1"]
    record = json.loads(places[0].read_text())
    assert (record["first_step"], record["last_step"]) == (12, 14)
    assert {each["rank"] for each in record["steps"]} == {0, 1}


@pytest.mark.slow
def test_a_disk_that_is_full_while_steps_are_profiled_costs_their_files_and_is_said(
    tmp_path: Path, calm_training: CalmTrainings
) -> None:
    held = "hold:forward-0-15-0"
    with (
        small_disk(tmp_path / "disk") as disk,
        OneNode(tmp_path / "run", 2, "--profile", "14-16", asks=[held], disk=disk) as run,
    ):
        run.wait_for("held", step=15)
        filler = fill(disk)
        run.release("forward-0-15-0")
        run.job.wait_for_output(r"profile\.json cannot be written \(No space left on device\)")
        filler.unlink()
        run.ended()
        result = run.result

    assert result["params_sha256"] == calm_training(2).result["params_sha256"]
    assert result["steps_lost"] == 0
    output = run.job.output
    assert re.search(r"rank_0\.json\.gz cannot be written \(No space left on device\)", output)
    assert re.search("profile: steps 14 to 16 took", output)
