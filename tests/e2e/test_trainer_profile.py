"""`--profile` of the bundled trainer, and the page of that run."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import COMMAND, RUN_LIMIT_S, Job, environment, finished, preloading

SHAPE = ["--steps", "8", "--global-batch", "4", "--micro-batch", "1", "--layers", "2", "--width", "64", "--heads", "2"]
SHAPE += ["--context", "32", "--out", "run"]
GRADIENT_BYTES = 4 * 2 * (12 * 64 * 64)


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


def test_the_traces_of_all_ranks_are_joined_and_the_summary_names_the_all_reduces(profiled: tuple[Path, Job]) -> None:
    folder, job = profiled

    place = folder / "logs" / "latest" / "attempt_0" / "profile"
    assert {path.name for path in place.iterdir()} == {
        *("rank_0.json.gz", "rank_1.json.gz", "trace.json.gz", "profile.json")
    }
    record = loaded(place / "profile.json")
    assert [(each["step"], each["rank"]) for each in record["steps"]] == [(4, 0), (5, 0), (4, 1), (5, 1)]
    for each in record["steps"]:
        assert 0 < each["exposed_all_reduce_s"] <= each["communication_s"] < each["seconds"]
        assert 0 < each["computation_s"] < each["seconds"]
    # Each step sends all gradients, and both ranks have each collective.
    for step in (4, 5):
        buckets = [each for each in record["buckets"] if each["step"] == step]
        assert {tuple(each["begins_s"]) for each in buckets} == {("0", "1")}
        assert sum(each["bytes"] for each in buckets if each["kind"] == "all_reduce") >= GRADIENT_BYTES
    assert record["collectives_compared"] == len(record["buckets"]) > 0
    names = {e["args"]["name"] for e in loaded(place / "trace.json.gz")["traceEvents"] if e["name"] == "process_name"}
    assert {re.sub(" on .*", "", name) for name in names} == {"rank 0", "rank 1"}
    said = re.findall(r"profile: (steps 4 to 5 took .*)", job.output)
    assert len(said) == 2
    assert re.search(r"all-reduce was under way for .* were exposed \(\d+% of the step\)", said[0])


def test_the_page_of_the_run_shows_the_profile(profiled: tuple[Path, Job]) -> None:
    folder, _ = profiled

    done = subprocess.run(
        [*COMMAND, "report", "logs", "--json", "-o", "page.html"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        timeout=RUN_LIMIT_S,
    )

    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["profiles"]
    assert (shown["first_step"], shown["last_step"]) == (4, 5)
    assert shown["steps"][0]["exposed_s"] > 0
    page = (folder / "page.html").read_text()
    assert "Computation and communication" in page
    assert shown["sentences"][0] in page.replace("&#39;", "'")
    (link,) = re.findall(r'href="([^"]+/trace\.json\.gz)"', page)
    assert (folder / link).is_file()


PLANS = [("zero1", 2), ("zero2", 2), ("fsdp2", 2), ("hsdp", 4), ("tp=2", 2), ("pp=2", 2), ("pp=2,schedule=gpipe", 2)]
PLANS += [("pp=2,schedule=interleaved", 2), ("tp=2,pp=2", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "workers"), PLANS)
def test_each_plan_is_profiled_on_all_ranks(tmp_path: Path, plan: str, workers: int) -> None:
    words = [*preloading("elaunch.trainer.train"), "--log-dir", "logs", "--nproc-per-node", str(workers)]
    words += ["-m", "elaunch.trainer", *SHAPE, "--layers", "4", "--parallel", plan, "--profile", "4-5"]

    job = finished(tmp_path, *words, env={"OMP_NUM_THREADS": "1"})

    assert job.code == 0, job.output
    place = tmp_path / "logs" / "latest" / "attempt_0" / "profile"
    record = loaded(place / "profile.json")
    ranks = set(range(workers))
    assert {(each["step"], each["rank"]) for each in record["steps"]} == {(s, rank) for s in (4, 5) for rank in ranks}
    for each in record["steps"]:
        assert 0 < each["communication_s"] < each["seconds"], each
        assert 0 <= each["exposed_s"] <= each["communication_s"], each
        assert 0 < each["computation_s"] < each["seconds"], each
    names = {e["args"]["name"] for e in loaded(place / "trace.json.gz")["traceEvents"] if e["name"] == "process_name"}
    assert {re.sub(" on .*", "", name) for name in names} == {f"rank {rank}" for rank in ranks}
    assert "profile: steps 4 to 5 took" in job.output
