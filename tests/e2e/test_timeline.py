"""The run's timeline: every stage of a restart is there, in order and in the documented form."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.core.timeline import SCHEMA_VERSION
from tests.event_schema import check_event
from tests.harness import finished, script

pytestmark = pytest.mark.usefixtures("without_torch")

# The survivor waits to be stopped. The other one dies when the survivor has come so far.
ONE_DIES_ONCE = """
import os, signal, time
from pathlib import Path
from elaunch.trainer import link

link.mark("restored")
if os.environ["ELAUNCH_GENERATION"] == "0":
    link.report(3)
    # A step that comes sooner after another is not reported.
    time.sleep(0.06)
    link.report(4 + int(os.environ["RANK"]))
    if os.environ["RANK"] == "1":
        while not Path("survivor").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    Path("survivor").touch()
    signal.pause()
"""
RAISES = "raise ValueError('the loss is NaN')"


def _lines(log_dir: Path) -> list[dict[str, Any]]:
    (path,) = log_dir.glob("*_*/timeline.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_restart_leaves_its_stages_in_the_log_folder(tmp_path: Path) -> None:
    script(tmp_path, ONE_DIES_ONCE)
    before_s = time.monotonic()

    job = finished(tmp_path, "--preload", "json", "--log-dir", "logs", "--nproc-per-node", "2", "train.py")

    assert job.code == 0, job.output
    lines = _lines(tmp_path / "logs")
    for line in lines:
        check_event(line)
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
    assert second[:4] == ["opened", "joined", "restarting", "sealed"]
    assert second[-3:] == ["stopped", "cleared", "ended"]
    assert lines[-1]["outcome"] == "succeeded"
    # A worker's mark is read a moment later than it was made.
    marks = [line for line in lines if line["event"] == "marked"]
    assert {(line["generation"], line["rank"], line["name"]) for line in marks} >= {
        (0, 0, "restored"),
        (0, 1, "restored"),
    }
    assert all(before_s < line["said_s"] <= line["monotonic_s"] for line in marks)
    # How far each rank came, and what was decided.
    (progress,) = (line for line in lines if line["event"] == "progress")
    assert progress["steps"][1] == 5
    assert progress["first_steps"][1] == 3
    (failed,) = (line for line in lines if line["event"] == "failed")
    assert (failed["rank"], failed["step"], failed["kind"]) == (1, 5, "signal")
    (restarting,) = (line for line in lines if line["event"] == "restarting")
    assert restarting["reason"] == "restart 1 of 3"
    assert restarting["failure"]["sentence"] == failed["sentence"]


def test_a_job_that_gives_up_tells_the_reason_and_the_traceback(tmp_path: Path) -> None:
    script(tmp_path, RAISES)

    job = finished(tmp_path, "--no-preload", "--log-dir", "logs", "train.py")

    assert job.code == 1, job.output
    lines = _lines(tmp_path / "logs")
    for line in lines:
        check_event(line)
    assert lines[0]["schema"] == SCHEMA_VERSION
    causes = [line for line in lines if line["event"] == "cause"]
    assert [cause["exception"] for cause in causes] == ["ValueError", "ValueError"]
    assert [lines[-2]["event"], lines[-1]["event"]] == ["gave_up", "ended"]
    assert "twice in a row" in lines[-2]["reason"]
    assert lines[-2]["failure"]["traceback"].endswith("ValueError: the loss is NaN")


def test_without_a_log_folder_there_is_none(tmp_path: Path) -> None:
    script(tmp_path, "print('done')")

    job = finished(tmp_path, "--preload", "json", "train.py")

    assert job.code == 0, job.output
    assert list(tmp_path.rglob("timeline.jsonl")) == []
