"""The bundled trainer is stopped between two steps, and goes on with as many workers as there are then."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elaunch.trainer.checkpoint.storage import marks
from tests.faults.trainings import GENTLE, CalmTrainings, OneNode
from tests.harness import wait_for


def stop(run: OneNode, held: str, workers: int, signum: signal.Signals) -> None:
    """Signal the job while a rank is held in a step; all stop after it."""
    step = int(held.split("-")[2])
    run.wait_for("held", step=step)
    told = len(run.of("told"))
    run.job.signal(signum)
    wait_for(lambda: len(run.of("told")) == told + workers, "all are told")
    run.release(held)
    run.ended(128 + signum)
    why = "interrupted" if signum == signal.SIGINT else "told to leave"
    assert f"stopped after step {step}, as it was {why}; the same command goes on from there" in run.job.output
    assert marks(run.out / "checkpoints")[-1].step == step


@pytest.mark.slow
def test_a_run_that_is_stopped_twice_and_goes_on_with_3_and_4_workers_has_the_losses_of_one_that_was_not(
    tmp_path: Path, calm_training: CalmTrainings
) -> None:
    # Each start counts its generations from 0.
    with OneNode(tmp_path / "run", 4, *GENTLE, asks=["hold:forward-0-13-0", "hold:backward-0-27-0"]) as run:
        stop(run, "forward-0-13-0", 4, signal.SIGTERM)
        run.start(3, *GENTLE)
        stop(run, "backward-0-27-0", 3, signal.SIGINT)
        run.start(4, *GENTLE)
        run.ended()

    assert [line["world_size"] for line in run.lines] == [4] * 13 + [3] * 14 + [4] * 13
    run.assert_complete()
    run.assert_close(calm_training(4, *GENTLE))
