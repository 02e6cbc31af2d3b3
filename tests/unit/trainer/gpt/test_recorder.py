"""What a run leaves behind for each step: read from the device at the log's pace, and never lost with rank 0."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.progress import Progress
from elaunch.trainer.gpt.recorder import Recorder
from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.ranks.place import RankInfo

ORDER = Order(100, global_batch=4, micro_batch=2)


class At:
    """A keeper that has restored a step."""

    def __init__(self, step: int, repeated: int = 0) -> None:
        self.step, self.repeated = step, repeated


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def recorder(folder: Path, generation: int = 0, **options: Any) -> Recorder:
    config = TrainConfig(steps=100, global_batch=4, context=8, **options)
    place, progress = RankInfo(0, 0, 1, generation), Progress(io.StringIO(), steps=100)
    device = torch.device("cpu")
    return Recorder(config, place, RunDirectory(folder), progress, device, flops_per_token=100.0, peak_flops=1e6)


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


def test_a_line_has_norm_rate_speed_mfu_and_a_held_out_loss_where_there_is_one(tmp_path: Path) -> None:
    with recorder(tmp_path).begin(At(0), ORDER) as found:
        train(found, range(1, 3), held_out={1: 5.5})

    first, second = rows(tmp_path)
    assert (first["loss"], first["grad_norm"], first["learning_rate"]) == (0.25, 2.5, 0.25)
    assert first["held_out_loss"] == 5.5
    assert "held_out_loss" not in second
    assert first["tokens_per_s"] == pytest.approx(first["tokens"] / first["seconds"], rel=0.1)
    assert first["mfu"] == pytest.approx(first["tokens_per_s"] * 100 / 1e6, rel=0.01, abs=1e-6)


def test_without_a_known_peak_there_is_no_mfu(tmp_path: Path) -> None:
    found = recorder(tmp_path)
    found._peak_flops = 0.0
    with found.begin(At(0), ORDER):
        train(found, range(1, 2))

    assert "mfu" not in rows(tmp_path)[0]


def test_lines_wait_for_the_log_for_a_checkpoint_and_for_the_end(tmp_path: Path) -> None:
    with recorder(tmp_path, log_every=4, checkpoint_every=6).begin(At(0), ORDER) as found:
        train(found, range(1, 4))
        assert steps_in(tmp_path) == []
        train(found, range(4, 6))
        assert steps_in(tmp_path) == [1, 2, 3, 4]
        train(found, range(6, 8))
        assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]

    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("log_every", [1, 4, 9])
def test_the_lines_that_a_killed_rank_0_had_not_written_are_in_the_state(tmp_path: Path, log_every: int) -> None:
    killed = recorder(tmp_path, log_every=log_every)
    killed.begin(At(0), ORDER)
    train(killed, range(1, 7))
    # The last line is only in the other ranks' state.
    train(killed, range(7, 8))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 7' not in line))

    again = recorder(tmp_path, generation=1, log_every=log_every)
    again.state.update(killed.state)
    with again.begin(At(7), ORDER):
        train(again, range(8, 10))

    assert steps_in(tmp_path) == list(range(1, 10))
    assert [row["generation"] for row in rows(tmp_path)] == [0] * 7 + [1] * 2
    assert [row["loss"] for row in rows(tmp_path)] == [step / 4 for step in range(1, 10)]
    # Only that clock was the dead process's.
    assert ["at" in row for row in rows(tmp_path)][-2:] == [True, True]
    assert "at" not in rows(tmp_path)[6]


def test_lines_that_are_there_are_not_written_twice(tmp_path: Path) -> None:
    with recorder(tmp_path).begin(At(0), ORDER) as before:
        train(before, range(1, 5))
    text = (tmp_path / "metrics.jsonl").read_text()

    again = recorder(tmp_path)
    again.state.update(before.state)
    with again.begin(At(4), ORDER):
        pass

    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_tensorboard_gets_each_line_and_forgets_steps_that_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package is not among the tests': this stands for its one class.
    shown: list[Any] = []

    class SummaryWriter:
        def __init__(self, log_dir: str, purge_step: int) -> None:
            shown.append((log_dir, purge_step))

        def add_scalar(self, tag: str, value: float, step: int, walltime: float | None) -> None:
            shown.append((tag, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            shown.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with recorder(tmp_path, tensorboard=True).begin(At(3), ORDER) as found:
        train(found, range(4, 5), held_out={4: 5.5})

    assert shown[0] == (str(tmp_path / "tensorboard"), 4)
    assert {("loss", 1.0, 4), ("grad_norm", 2.5, 4), ("learning_rate", 0.25, 4)} < set(shown)
    assert ("held_out_loss", 5.5, 3) in shown
    assert shown[-1] == "closed"
