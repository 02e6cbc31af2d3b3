"""The bundled trainer, killed at any moment: no step is lost while a worker lives, no sample comes twice, same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.trainings import RESTORED, CalmTrainings, OneNode


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
