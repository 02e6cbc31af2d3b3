"""metrics.jsonl holds each step once, whatever was killed when."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elaunch.trainer.metrics import Line, Metrics


def line(step: int) -> Line:
    return {"step": step, "loss": 0.1 + step, "tokens": 96, "seconds": 0.5, "world_size": 2, "generation": 1}


def write(path: Path, steps: range, restored_step: int = 0) -> None:
    metrics = Metrics(path, restored_step)
    for step in steps:
        metrics.append(line(step))
    metrics.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(row)["step"] for row in path.read_text().splitlines()]


def test_lines_are_appended_in_order_and_losses_survive_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 4))

    rows = [json.loads(row) for row in (tmp_path / "m").read_text().splitlines()]
    assert rows == [line(1), line(2), line(3)]


def test_lines_past_the_restored_step_are_cut(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 9))

    write(tmp_path / "m", range(6, 8), restored_step=5)

    assert steps_in(tmp_path / "m") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("torn", [b"{", b'{"step": 4, "lo', b'{"step": 4}', b"\0\0\0\n", b'"text"\n'])
def test_a_torn_last_line_goes(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path / "m", range(1, 4))
    with (tmp_path / "m").open("ab") as file:
        file.write(torn)

    write(tmp_path / "m", range(4, 5), restored_step=9)

    assert steps_in(tmp_path / "m") == [1, 2, 3, 4]


def test_a_fresh_start_empties_the_file(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 4))

    write(tmp_path / "m", range(1, 2), restored_step=0)

    assert steps_in(tmp_path / "m") == [1]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path / "m", 0)
    metrics.append(line(1))
    real = os.pwrite
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda descriptor, content, offset: real(descriptor, content[:5], offset))
        with pytest.raises(OSError, match="No space left"):
            metrics.append(line(2))

    metrics.append(line(3))
    metrics.close()

    assert steps_in(tmp_path / "m") == [1, 3]
