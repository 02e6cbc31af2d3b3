"""report_page.metrics and .charts: curves of bounded length."""

from __future__ import annotations

import math

from elaunch.launcher.report_page.charts import chart, nice_ticks
from elaunch.launcher.report_page.metrics import POINTS, Curve, StepMetrics
from tests.fuzzing import bounded


def test_a_curve_of_any_length_has_a_bounded_number_of_points_and_keeps_its_extremes() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, 100.0 if step == 77_777 else step % 10)

    assert len(curve.points) <= 2 * POINTS
    assert sum(point.count for point in curve.points) == 100_000
    assert max(point.high for point in curve.points) == 100.0
    assert min(point.low for point in curve.points) == 0
    assert [point.step for point in curve.points] == sorted(point.step for point in curve.points)
    # Early steps are drawn as finely as late ones.
    assert len({point.count for point in curve.points[:-1]}) == 1


def test_a_loss_that_is_no_number_is_told_with_its_first_step() -> None:
    rows = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "loss": NaN}', b'{"step": 3, "loss": Infinity}', b'{"step": 4}']

    metrics = StepMetrics().add_all(rows)
    metrics.loss.add(5, 1.0)

    drawn = chart("Loss", "", metrics.loss, (), from_zero=False)
    assert drawn
    assert drawn.remark == "Loss: not a number from step 2 on, in 2 steps"


def test_lines_that_are_no_steps_are_counted_and_left_out() -> None:
    rows = [b"x", b"[]", b'{"step": true}', b'{"step": -1}', b'{"step": 1e3}', b"\xff\n", b"[" * 60_000, b"\n"]

    with bounded():
        metrics = StepMetrics().add_all([*rows, b'{"step": 1, "loss": "x", "seconds": 1e999, "generation": 10}'])

    assert (metrics.steps, metrics.unreadable) == (1, 7)
    assert not metrics.loss.points
    assert not metrics.stretches


def test_one_slow_step_does_not_flatten_the_plot() -> None:
    curve = Curve()
    for step in range(1, 301):
        curve.add(step, 60.0 if step == 150 else 0.1)

    drawn = chart("Step time", "s", curve, (), from_zero=True)

    assert drawn
    assert drawn.remark == "Step time: the slowest step, near step 150, took 60.0 s above the plot"
    assert [tick.words for tick in drawn.y_ticks][-1] == "0.2"


def test_ticks_are_round_and_cover_the_values() -> None:
    for low, high in ((0, 1), (2.1, 5.3), (-3, 1e6), (1e-9, 2e-9), (5, 5)):
        ticks = nice_ticks(low, high, 4)

        assert ticks[0] <= low
        assert ticks[-1] >= high - 1e-12
        assert 1 <= len(ticks) <= 8
        assert all(math.isfinite(tick) for tick in ticks)
