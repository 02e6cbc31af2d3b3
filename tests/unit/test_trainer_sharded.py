"""Snapshots of a state in parts, of one process: which of two versions is written over, and what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elaunch.trainer import pieces
from elaunch.trainer.pieces import PieceFile
from elaunch.trainer.sharded import ShardedMemory


def test_a_snapshot_that_failed_is_written_over_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("asked for by the test")

    said: list[str] = []
    memory, state = ShardedMemory(tmp_path, say=said.append, generation=0), {"w": torch.zeros(8)}
    memory.save(1, state)
    memory.wait()
    with monkeypatch.context() as patch:
        patch.setattr(PieceFile, "complete", full)
        memory.save(2, state)
        memory.wait()

    # As if it were killed before the next is whole.
    monkeypatch.setattr(PieceFile, "mark", lambda self: None)
    memory.save(3, state)
    memory.wait()

    assert said == ["rank 0: the snapshot is on its own node only: asked for by the test"]
    assert ShardedMemory(tmp_path, generation=1).newest() == (0, 1)


def test_who_asks_for_the_newest_and_loads_it_has_it_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ShardedMemory(tmp_path, generation=0)
    first.save(1, {"w": torch.full((8,), 7.0)})
    first.wait()
    real, read = pieces._sum, []
    monkeypatch.setattr(pieces, "_sum", lambda data: read.append(data.numel()) or real(data))
    memory, state = ShardedMemory(tmp_path, generation=1), {"w": torch.zeros(8)}

    assert memory.newest() == memory.load(state) == (0, 1)

    assert len(read) == 1
    assert state["w"].tolist() == [7.0] * 8
