"""--log-format: what a file, a person and a log collector get of a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import finished, script

pytestmark = pytest.mark.usefixtures("without_torch")

SPEAKS = """
import os, sys, time
print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
if os.environ["RANK"] == "0":
    sys.exit(open("said", "w").close())
while not os.path.exists("said"):
    time.sleep(0.01)
sys.exit(5)
"""
JOB = ("--no-preload", "--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "logs", "train.py")


def test_a_collector_gets_objects_only_and_the_files_stay_as_they_were(tmp_path: Path) -> None:
    script(tmp_path, SPEAKS)

    job = finished(tmp_path, "--log-format", "json", *JOB)

    assert job.code == 1, job.output
    lines = [json.loads(line) for line in job.stderr.splitlines()]
    workers = [json.loads(line) for line in job.stdout.splitlines()] + [line for line in lines if "rank" in line]
    said = sorted((line["rank"], line["stream"], line["text"]) for line in workers)
    assert said == [(rank, f"std{way}", f"{way} {rank}") for rank in range(2) for way in ("err", "out")]
    failed = [line for line in lines if line["text"].startswith("rank 1 (")]
    assert [line["level"] for line in failed] == ["error"]
    assert {line["level"] for line in lines if line["text"].startswith("generation 0")} == {"info"}
    report = lines[-1]["report"]
    assert (report["outcome"], report["exit_code"], report["failure"]["rank"]) == ("failed", 1, 1)
    assert "train.py FAILED" in lines[-1]["text"]
    assert (tmp_path / "logs" / "latest" / "attempt_0" / "1" / "stderr.log").read_text() == "err 1\n"
