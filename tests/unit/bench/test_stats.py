"""bench.samples: what a list of samples says, and how it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.samples import Run, Sample, decode, percentile, write


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.95, 3.0), ([1.0, 2.0], 0.5, 1.5), ([2.0, 1.0, 3.0], 1.0, 3.0), (list(range(21)), 0.95, 19.0)],
)
def test_a_percentile_lies_linearly_between_two_values(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_results_are_the_same_after_they_were_kept(tmp_path: Path) -> None:
    sample = Sample("start", "elaunch", 2, {"first all-reduce": 1.5}, {"sealed": 0.5})
    run = Run({"CPUs": "2"}, {"seed": "1"}, (sample, Sample("start", "torchrun", 2, why="died")))

    write(tmp_path / "deep" / "results.json", run)

    assert decode((tmp_path / "deep" / "results.json").read_text()) == run
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["results.json"]
