"""The bundled trainer with its state in parts, and compiled: the losses of DDP, and a kill costs what the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.trainings import GENTLE, STEPS, CalmTrainings, OneNode
from tests.harness import slow

SNAPSHOT_EVERY = 5


@pytest.mark.parametrize(
    ("options", "shape", "steps_lost_max", "tolerance"),
    [
        ("--parallel zero1", (), SNAPSHOT_EVERY - 1, 0.0),
        ("--parallel fsdp2", (), SNAPSHOT_EVERY - 1, 1e-5),
        # The compiler draws other dropout masks.
        slow("--compile", ("--dropout", "0"), 0, 1e-5),
    ],
)
def test_a_killed_worker_costs_no_more_than_the_steps_since_the_snapshot_and_the_losses_are_those_of_ddp(
    tmp_path: Path,
    calm_training: CalmTrainings,
    options: str,
    shape: tuple[str, ...],
    steps_lost_max: int,
    tolerance: float,
) -> None:
    words = (*GENTLE, *shape, *options.split(), "--snapshot-every", str(SNAPSHOT_EVERY), "--eval-every", "11")
    with OneNode(tmp_path / "run", 2, *words, asks=["loss-0-24-1"]) as run:
        run.ended()
    calm = calm_training(2, *GENTLE, *shape)

    assert run.struck() == ["loss-0-24-1"]
    # 23 steps were done.
    lost = 23 - run.began(1)
    assert 0 <= lost <= steps_lost_max
    run.assert_complete(lost=lost)
    assert max(abs(loss - calm.losses[step]) / loss for step, loss in run.losses.items()) <= tolerance
    assert run.result["held_out_loss"] == pytest.approx(calm.result["held_out_loss"], rel=tolerance or 1e-12)
    norms = {line["step"]: line["grad_norm"] for line in calm.lines}
    assert all(line["grad_norm"] == pytest.approx(norms[line["step"]], rel=1e-4) for line in run.lines)
    evaluated = {line["step"]: line["held_out_loss"] for line in run.lines if "held_out_loss" in line}
    assert list(evaluated) == [1, 12, 23, 34]
    assert evaluated[1] > evaluated[34] > run.result["held_out_loss"]
    assert len(run.lines) == STEPS
