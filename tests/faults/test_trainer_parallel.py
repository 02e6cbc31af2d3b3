"""The bundled trainer with its state in parts, and compiled: the losses of DDP, and a kill costs what the docs say."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.trainings import GENTLE, CalmTrainings, Forked, OneNode, Training
from tests.harness import slow
from tests.ranks import RankForker

# Fewer steps of fewer, larger micro-batches than in other tests: each costs FSDP2 much.
STEPS, LOSE_AT_MOST = 20, 5
# The kills come between two snapshots, and all ranks have the one before (docs/trainer.md, "What a failure costs").
LOST_MAX = LOSE_AT_MOST - 1
# A C++ compiler takes a while on a busy machine.
COMPILED_S = 900.0
SHORT = (*GENTLE, "--steps", str(STEPS), "--micro-batch", "3")


def struck(folder: Path, words: tuple[str, ...], forker: RankForker) -> Training:
    """The training after its end. Rank 1 was killed in step 14."""
    asks = ["loss-0-14-1"]
    if "--compile" in words:
        # The compiler's processes outlive a killed rank and hold its connections open. An agent ends them.
        with OneNode(folder, 2, *words, asks=asks) as launched:
            return launched.ended(deadline_s=COMPILED_S)
    with Forked(folder, forker, asks=asks) as forked:
        assert forked.generation(0, 2, *words)[1].code == -signal.SIGKILL
        assert [rank.code for rank in forked.generation(1, 2, *words)] == [0, 0]
    return forked


@pytest.mark.parametrize(
    ("options", "shape", "steps_lost_max", "tolerance"),
    [
        slow("--parallel zero1", (), LOST_MAX, 0.0),
        ("--parallel fsdp2", (), LOST_MAX, 1e-5),
        # The compiler draws other dropout masks.
        slow("--compile", ("--dropout", "0"), 0, 1e-5),
        slow("--parallel tp=2 --compile", ("--dropout", "0"), LOST_MAX, 1e-5),
        slow("--parallel pp=2 --compile", ("--dropout", "0", "--layers", "2"), LOST_MAX, 1e-5),
    ],
)
def test_a_killed_worker_costs_no_more_than_the_steps_since_the_snapshot_and_the_losses_are_those_of_ddp(
    tmp_path: Path,
    forker: RankForker,
    calm_training: CalmTrainings,
    options: str,
    shape: tuple[str, ...],
    steps_lost_max: int,
    tolerance: float,
) -> None:
    words = (*SHORT, *shape, *options.split(), "--lose-at-most", str(LOSE_AT_MOST), "--eval-every", "11")
    run = struck(tmp_path / "run", words, forker)
    calm = calm_training(2, *SHORT, *shape, steps=STEPS)

    assert run.struck() == ["loss-0-14-1"]
    # 13 steps were done.
    lost = 13 - run.began(1)
    assert 0 <= lost <= steps_lost_max
    run.assert_complete(lost=lost, steps=STEPS)
    assert run.difference(calm) <= tolerance
    assert run.result["held_out_loss"] == pytest.approx(calm.result["held_out_loss"], rel=tolerance or 1e-12)
    norms = {line["step"]: line["grad_norm"] for line in calm.lines}
    assert all(line["grad_norm"] == pytest.approx(norms[line["step"]], rel=1e-4) for line in run.lines)
    evaluated = {line["step"]: line["held_out_loss"] for line in run.lines if "held_out_loss" in line}
    assert list(evaluated) == [1, 12]
    assert evaluated[1] > evaluated[12] > run.result["held_out_loss"]
    assert len(run.lines) == STEPS
