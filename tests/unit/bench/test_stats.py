"""bench.samples: the summary of a list of samples, and its file."""

from __future__ import annotations

from pathlib import Path

from bench.samples import Run, Sample, decode, write


def test_results_are_the_same_after_they_were_kept(tmp_path: Path) -> None:
    sample = Sample("start", "elaunch", 2, {"first all-reduce": 1.5}, {"sealed": 0.5})
    run = Run({"CPUs": "2"}, {"seed": "1"}, (sample, Sample("start", "torchrun", 2, why="died")))

    write(tmp_path / "deep" / "results.json", run)

    assert decode((tmp_path / "deep" / "results.json").read_text()) == run
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["results.json"]
