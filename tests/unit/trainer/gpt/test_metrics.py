"""metrics.jsonl holds each step once, whatever was killed when."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elaunch.trainer.gpt.metrics import Line, Metrics


def line(step: int) -> Line:
    return {"step": step, "loss": 0.1 + step, "tokens": 96, "seconds": 0.5, "world_size": 2, "generation": 1}


def write(path: Path, steps: range, restored_step: int = 0) -> None:
    metrics = Metrics(path, restored_step)
    for step in steps:
        metrics.append(line(step))
    metrics.close()


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in rows_in(path)]


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


def test_lines_are_appended_in_order_and_losses_survive_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 4))

    assert rows_in(tmp_path / "m") == [{**line(step), "steps_lost": 0} for step in (1, 2, 3)]


def test_lines_past_the_restored_step_make_room_for_the_first_new_one(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 9))

    write(tmp_path / "m", range(6, 8), restored_step=5)

    assert steps_in(tmp_path / "m") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("torn", [b"{", b'{"step": 4, "lo', b'{"step": 4}', b"[4]\n", b"\0\0\0\n", b'"text"\n'])
def test_a_torn_last_line_goes(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path / "m", range(1, 4))
    with (tmp_path / "m").open("ab") as file:
        file.write(torn)

    write(tmp_path / "m", range(4, 5), restored_step=9)

    assert steps_in(tmp_path / "m") == [1, 2, 3, 4]


def test_lost_steps_are_counted_from_the_lines_once_and_again_if_they_are_lost_again(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 9))

    # This one is killed before its first line.
    assert Metrics(tmp_path / "m", 5).steps_lost == 3
    write(tmp_path / "m", range(6, 8), restored_step=5)
    write(tmp_path / "m", range(7, 10), restored_step=6)

    assert [row["steps_lost"] for row in rows_in(tmp_path / "m")] == [0, 0, 0, 0, 0, 3, 4, 4, 4]


def test_a_step_that_only_another_rank_had_done_is_lost_too(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 9))

    assert Metrics(tmp_path / "m", 8, done=9).steps_lost == 1
    assert Metrics(tmp_path / "m", 7, done=9).steps_lost == 2
    assert Metrics(tmp_path / "m", 8, done=8).steps_lost == 0


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
