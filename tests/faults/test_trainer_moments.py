"""The bundled trainer, killed at any moment: no step is lost while a worker lives, no sample comes twice, same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.trainings import DEADLINE_S, RESTORED, CalmTrainings, OneNode

HUNG = r"rank {} \(.*\) hung: .* it is stopped by a signal \(SIGSTOP\)"


# The kills in each generation of one job of three workers. It takes no snapshot after step 1, so survivors must save.
STORM = ["freeze:forward-0-7-2", "publish-1-20-0", "published-2-30-0", "evaluating-3-0-2", "result-4-0-0"]


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> OneNode:
    """The job of STORM after its end, with whatever exit code."""
    folder = tmp_path_factory.mktemp("storm") / "run"
    with OneNode(folder, 3, "--lose-at-most", "100", asks=STORM, launch="--hang-timeout 8") as run:
        run.job.wait(DEADLINE_S)
        run.job.assert_nothing_is_left()
        run.assert_no_memory_is_left()
    return run


@pytest.mark.slow
def test_a_frozen_worker_is_found_and_costs_no_step(storm: OneNode) -> None:
    assert storm.struck("frozen") == ["forward-0-7-2"]
    assert re.search(HUNG.format(2), storm.job.output)
    assert storm.began(1) == 6


@pytest.mark.slow
def test_a_kill_at_a_checkpoint_or_the_end_loses_no_step(storm: OneNode) -> None:
    assert storm.struck() == STORM[1:]
    restored = re.findall(RESTORED, storm.job.output)
    assert len(restored) == len(STORM)
    assert {repeated for *_, repeated in restored} == {"0"}


@pytest.mark.slow
def test_after_all_of_these_the_run_is_complete_and_its_end_that_of_the_unfailed_one(
    storm: OneNode, calm_training: CalmTrainings
) -> None:
    assert storm.job.code == 0, storm.job.output
    assert storm.result["restarts"] == len(STORM)
    storm.assert_complete()
    storm.assert_same(calm_training(3))


# test_keeper_kills.py also tests all but the last four moments for keepers. The tests above cover those four.
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_kill_at_any_moment_loses_no_step_and_changes_no_bit(
    tmp_path: Path, calm_training: CalmTrainings, workers: int
) -> None:
    last = workers - 1
    moments = [("forward", 1, last), ("forward", 3, 0), ("backward", 5, 0), ("backward", 6, last), ("loss", 7, last)]
    moments += [("optimizer", 8, 0), ("optimizer", 9, last), ("unwritten", 11, 0), ("committed", 13, last)]
    # Twice in a row, and before it has computed anything.
    moments += [("restore", 0, 0), ("restore", 0, last), ("start", 0, 0)]
    moments += [("copy", 16, 0), ("publish", 20, 0), ("published", 30, 0), ("evaluating", 0, last), ("result", 0, 0)]
    asks = [f"{moment}-{generation}-{step}-{rank}" for generation, (moment, step, rank) in enumerate(moments)]

    with OneNode(tmp_path / "run", workers, "--lose-at-most", "1", asks=asks) as run:
        run.ended()

    assert run.struck() == asks
    restored = re.findall(RESTORED, run.job.output)
    assert len(restored) >= len(moments) - 4
    assert {repeated for *_, repeated in restored} == {"0"}
    assert run.result["restarts"] == len(moments)
    run.assert_complete()
    run.assert_same(calm_training(workers))
