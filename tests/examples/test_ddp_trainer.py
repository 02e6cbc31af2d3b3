"""The bundled trainer with each communication hook: after a kill it ends with the weights of the run left alone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.trainings import CalmTrainings, Forked
from tests.harness import slow
from tests.ranks import RankForker

STEPS, LOSE_AT_MOST = 20, 5
# The kills come between two snapshots, and all ranks have the one before (docs/keeper.md, "What a failure costs").
LOST_MAX = LOSE_AT_MOST - 1
# A checkpoint that is newer than the snapshot would be taken instead, and has no hook's state.
SHORT = ("--steps", str(STEPS), "--micro-batch", "3", "--checkpoint-every", str(STEPS))
# Several buckets in a model of 28 kB.
BUCKETS = ("--bucket-mb", "0.01")


@pytest.mark.parametrize(
    ("options", "workers", "lost_max"),
    [
        # The ranks have a state each, and go back to a snapshot.
        (("--comm-hook", "powersgd"), 3, LOST_MAX),
        # Every survivor has all of the state.
        slow(("--comm-hook", "fp16", *BUCKETS), 3, 0),
        slow(("--comm-hook", "bf16", *BUCKETS), 3, 0),
        slow(("--comm-hook", "powersgd", "--parallel", "zero1"), 2, LOST_MAX),
        slow(BUCKETS, 3, 0),
        # Two summands have one order: whatever is chosen, the result is the same.
        slow(("--tune-comm",), 2, 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_killed_worker_changes_nothing_in_the_result(
    tmp_path: Path,
    forker: RankForker,
    calm_training: CalmTrainings,
    options: tuple[str, ...],
    workers: int,
    lost_max: int,
) -> None:
    words = (*SHORT, *options)
    calm = calm_training(workers, *words, steps=STEPS)
    kept = (*words, "--lose-at-most", str(LOSE_AT_MOST))

    with Forked(tmp_path / "run", forker, asks=["loss-0-14-1"]) as run:
        assert run.generation(0, workers, *kept)[1].code == -signal.SIGKILL
        assert [rank.code for rank in run.generation(1, workers, *kept)] == [0] * workers

    lost = 13 - run.began(1)
    assert 0 <= lost <= lost_max
    run.assert_complete(lost=lost, steps=STEPS)
    run.assert_same(calm)
