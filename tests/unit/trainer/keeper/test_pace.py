"""Snapshots are taken as often as possible while they cost at most a hundredth of the time."""

from __future__ import annotations

import pytest

from elaunch.trainer.keeper.sync_schedule import SHARE, Pace


def run(pace: Pace, steps: int, step_s: float, snapshot_s: float) -> list[int]:
    taken = []
    for step in range(1, steps + 1):
        pace.step_took(step_s)
        if pace.is_due(step):
            pace.snapshot_took(step, snapshot_s)
            taken.append(step)
    return taken


@pytest.mark.parametrize(("step_s", "snapshot_s"), [(0.1, 0.001), (0.1, 0.002), (0.05, 0.03), (0.5, 2.0), (1.0, 0.0)])
def test_the_cost_stays_under_the_share(step_s: float, snapshot_s: float) -> None:
    steps = 20_000

    taken = run(Pace(None, 0), steps, step_s, snapshot_s)

    assert len(taken) * snapshot_s <= 1.001 * SHARE * steps * step_s + snapshot_s
    # And no fewer than that allows.
    assert (len(taken) + 2) * max(snapshot_s, SHARE * step_s) >= 0.98 * SHARE * steps * step_s


def test_the_first_step_has_a_copy_whatever_it_costs() -> None:
    assert run(Pace(None, 0), 50, 0.1, 100.0) == [1]
    assert run(Pace(20, 0), 50, 0.1, 100.0) == [1, 21, 41]


def test_a_restored_step_has_one_already() -> None:
    assert run(Pace(10, 40), 40, 0.1, 0.1) == []
    assert not Pace(10, 40).is_due(49)
    assert Pace(10, 40).is_due(50)


def test_copies_that_take_new_memory_are_not_measured() -> None:
    pace = Pace(None, 0, fresh=2, share=0.01)
    pace.step_took(1.0)
    for step in (1, 2):
        assert pace.is_due(step)
        pace.snapshot_took(step, 5.0)
    assert pace.every == 1

    pace.snapshot_took(3, 0.02)

    assert pace.every == 2
