"""The run's timeline: every stage of a restart is there, in order."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.harness import finished, script

# The survivor waits to be stopped.
ONE_DIES_ONCE = """
import os, signal

if os.environ["ELAUNCH_GENERATION"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


def _lines(log_dir: Path) -> list[dict[str, Any]]:
    (path,) = log_dir.glob("*/timeline.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_restart_leaves_its_stages_in_the_log_folder(tmp_path: Path) -> None:
    script(tmp_path, ONE_DIES_ONCE)
    before_s = time.monotonic()

    job = finished(tmp_path, "--preload", "json", "--log-dir", "logs", "--nproc-per-node", "2", "train.py")

    assert job.code == 0, job.output
    lines = _lines(tmp_path / "logs")
    times = [line["monotonic_s"] for line in lines]
    assert before_s < min(times)
    assert max(times) < time.monotonic()
    first = [line["event"] for line in lines if line["generation"] == 0]
    stages = ["sealed", "ordered", "exited", "stopping", "exited", "stopped", "cleared"]
    assert [event for event in first if event in stages] == stages
    dead = next(line for line in lines if line["event"] == "exited")
    assert (dead["rank"], dead["local_rank"], dead["code"]) == (1, 1, -9)
    forked = {line["rank"]: line["pid"] for line in lines if line["event"] == "forked" and line["generation"] == 0}
    assert forked.keys() == {0, 1}
    assert forked[1] == dead["pid"]
    # The store's process may end at any time, also after the last event of its generation.
    second = [line["event"] for line in lines if line["generation"] == 1 and line["event"] != "store_exited"]
    assert second[:3] == ["opened", "joined", "sealed"]
    assert second[-3:] == ["stopped", "cleared", "ended"]
    assert lines[-1]["outcome"] == "succeeded"


def test_without_a_log_folder_there_is_none(tmp_path: Path) -> None:
    script(tmp_path, "print('done')")

    job = finished(tmp_path, "--preload", "json", "train.py")

    assert job.code == 0, job.output
    assert list(tmp_path.rglob("timeline.jsonl")) == []
