"""`--profile` of the bundled trainer."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Job, finished, preloading

SHAPE = ["--steps", "8", "--global-batch", "4", "--micro-batch", "1", "--layers", "2", "--width", "64", "--heads", "2"]
SHAPE += ["--context", "32", "--out", "run"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """A run of two workers whose steps 4 and 5 are profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    words = [
        *preloading("elaunch.trainer.train"),
        "--log-dir",
        "logs",
        "--nproc-per-node",
        "2",
        "-m",
        "elaunch.trainer",
    ]
    job = finished(folder, *words, *SHAPE, "--profile", "4-5", env={"OMP_NUM_THREADS": "1"})
    assert job.code == 0, job.output
    return folder, job


def loaded(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


@pytest.mark.slow
def test_the_traces_of_all_ranks_are_joined_and_the_table_has_each_rank(profiled: tuple[Path, Job]) -> None:
    folder, job = profiled

    place = folder / "logs" / "latest" / "attempt_0" / "profile"
    assert {path.name for path in place.iterdir()} == {
        *("rank_0.json.gz", "rank_1.json.gz", "trace.json.gz", "profile.json")
    }
    check(place, {0, 1})
    assert re.search(r"profile: steps 4 to 5 took .* each; computation covered \d+% of the communication", job.output)
    assert re.search(r"profile: rank +step +computes +communicates +exposed", job.output)
    assert len(re.findall(r"profile: +[01] +[\d.]+ m?s +[\d.]+ m?s", job.output)) == 2


def check(place: Path, ranks: set[int]) -> None:
    """The record and the joined trace have all ranks, and each has computed and communicated."""
    record = loaded(place / "profile.json")
    assert [(each["rank"], each["step"]) for each in record["steps"]] == [(r, s) for r in sorted(ranks) for s in (4, 5)]
    for each in record["steps"]:
        assert 0 < each["communication_s"] < each["seconds"], each
        assert 0 <= each["exposed_s"] <= each["communication_s"], each
        assert 0 < each["computation_s"] < each["seconds"], each
    names = {e["args"]["name"] for e in loaded(place / "trace.json.gz")["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {rank}" for rank in ranks}
