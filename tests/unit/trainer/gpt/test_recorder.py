"""What a run leaves behind for each step: read from the device at the log's pace, and never lost with rank 0."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import RunDirectory, TrainConfig
from elaunch.trainer.gpt.recorder import LOG_EVERY, Line, Metrics, Recorder
from elaunch.trainer.ranks import RankInfo

pytestmark = pytest.mark.usefixtures("group")

ORDER = Order(100, global_batch=4, micro_batch=2)


class At:
    """A keeper that has restored a step."""

    def __init__(self, step: int, repeated: int = 0) -> None:
        self.step, self.repeated = step, repeated


def recorder(
    folder: Path, generation: int = 0, steps: int = 100, log: Callable[[str], None] = print, **options: Any
) -> Recorder:
    config = TrainConfig(steps=steps, global_batch=4, context=8, **options)
    return Recorder(config, RankInfo(0, 0, 1, generation), RunDirectory(folder), log, torch.device("cpu"))


def train(recorder: Recorder, steps: range, held_out: dict[int, float] | None = None) -> None:
    for step in steps:
        loss = recorder.mean_loss(torch.tensor(step / 4))
        held = (held_out or {}).get(step)
        unheld = None if held is None else torch.tensor(held)
        recorder.keep(step, loss=loss, grad_norm=torch.tensor(2.5), learning_rate=0.25, held_out=unheld)
        recorder.step_done(step)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_in(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder)]


def test_lines_wait_for_the_log_for_a_checkpoint_and_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOG_EVERY, "cpu", 4)
    with recorder(tmp_path, checkpoint_every=6).begin(At(0), ORDER) as found:
        train(found, range(1, 4))
        assert steps_in(tmp_path) == []
        train(found, range(4, 6))
        assert steps_in(tmp_path) == [1, 2, 3, 4]
        train(found, range(6, 8))
        assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]

    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("log_every", [1, 4, 9])
def test_the_lines_that_a_killed_rank_0_had_not_written_are_in_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int
) -> None:
    monkeypatch.setitem(LOG_EVERY, "cpu", log_every)
    killed = recorder(tmp_path)
    killed.begin(At(0), ORDER)
    train(killed, range(1, 7))
    # The last line is only in the other ranks' state.
    train(killed, range(7, 8))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 7' not in line))

    again = recorder(tmp_path, generation=1)
    again.state.update(killed.state)
    with again.begin(At(7), ORDER):
        train(again, range(8, 10))

    assert steps_in(tmp_path) == list(range(1, 10))
    assert [row["generation"] for row in rows(tmp_path)] == [0] * 7 + [1] * 2
    assert [row["loss"] for row in rows(tmp_path)] == [step / 4 for step in range(1, 10)]
    # Only that clock was the dead process's.
    assert ["at" in row for row in rows(tmp_path)][-2:] == [True, True]
    assert "at" not in rows(tmp_path)[6]


def line(step: int) -> Line:
    return {"step": step, "loss": 0.1 + step, "tokens": 96, "seconds": 0.5, "world_size": 2, "generation": 1}


def write(folder: Path, steps: range, restored_step: int = 0) -> None:
    metrics = Metrics(folder / "metrics.jsonl", restored_step)
    for step in steps:
        metrics.append(line(step))
    metrics.close()


@pytest.mark.parametrize("torn", [b"{", b'{"step": 4, "lo', b'{"step": 4}', b"[4]\n", b"\0\0\0\n", b'"text"\n'])
def test_a_torn_last_line_goes(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)

    write(tmp_path, range(4, 5), restored_step=9)

    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_lost_steps_are_counted_from_the_lines_once_and_again_if_they_are_lost_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9))

    # This one is killed before its first line.
    assert Metrics(tmp_path / "metrics.jsonl", 5).steps_lost == 3
    write(tmp_path, range(6, 8), restored_step=5)
    write(tmp_path, range(7, 10), restored_step=6)

    assert [row["steps_lost"] for row in rows(tmp_path)] == [0, 0, 0, 0, 0, 3, 4, 4, 4]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.append(line(1))
    real = os.pwrite
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda descriptor, content, offset: real(descriptor, content[:5], offset))
        with pytest.raises(OSError, match="No space left"):
            metrics.append(line(2))

    metrics.append(line(3))
    metrics.close()

    assert steps_in(tmp_path) == [1, 3]


def test_people_get_about_ten_lines_and_the_held_out_losses(tmp_path: Path) -> None:
    shown: list[str] = []
    with recorder(tmp_path, steps=1000, log=shown.append).begin(At(0), ORDER) as found:
        train(found, range(1, 1001), held_out={51: 2.5})

    assert len(shown) == 12
    assert re.fullmatch(r"step 1/1000  loss 0.250  norm 2.50  [\d,]+ tokens/s  \d:\d\d:\d\d left", shown[0])
    assert shown[1] == "held-out loss 2.500 after step 50"
    assert shown[-1].startswith("step 1000/1000")
