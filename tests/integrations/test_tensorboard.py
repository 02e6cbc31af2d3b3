"""The bundled trainer's `--tensorboard` with the real package: what is written is read by TensorBoard's own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.trainings import PROGRAM
from tests.harness import Job

pytestmark = pytest.mark.slow
pytest.importorskip("tensorboard", reason="tensorboard is not installed; `make integrations` installs it")

SMALL = ("--steps", "6", "--eval-every", "3", "--layers", "1", "--heads", "2", "--width", "16", "--context", "16")


def test_the_events_have_the_lines_of_the_metrics_each_step_once_also_after_a_restart(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    # Rank 0, which writes both, dies when others may have committed the step.
    (tmp_path / "optimizer-0-4-0").touch()
    words = ("--nproc-per-node", "2", str(PROGRAM), str(tmp_path), "--out", str(run), "--tensorboard", *SMALL)

    with Job(tmp_path, *words, env={"OMP_NUM_THREADS": "1"}) as job:
        assert job.wait(180) == 0, job.output

    assert "restart 1 of" in job.output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert "loss" in tags, tags
    read = {event.step: event.value for event in events.Scalars("loss")}
    written = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert written
    assert read == pytest.approx(written)
    assert len(events.Scalars("loss")) == len(written)
