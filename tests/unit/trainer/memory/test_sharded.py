"""Snapshots of a state in parts, of one process: which of two versions is written over, and what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elaunch.trainer.memory import shard_file
from elaunch.trainer.memory.shard_choice import Piece
from elaunch.trainer.memory.shard_file import MARK, PieceFile, Received, StoredPiece, Torn
from elaunch.trainer.memory.sharded import ShardedMemory


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

    # Simulate a kill before the next snapshot is whole.
    monkeypatch.setattr(PieceFile, "mark", lambda self: None)
    memory.save(3, state)
    memory.wait()

    assert said == ["rank 0: the snapshot is on its own node only: asked for by the test"]
    assert ShardedMemory(tmp_path, generation=1).newest() == (0, 1)


def test_who_asks_for_the_newest_and_loads_it_has_it_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ShardedMemory(tmp_path, generation=0)
    first.save(1, {"w": torch.full((8,), 7.0)})
    first.wait()
    real, read = shard_file.sum_of, []
    monkeypatch.setattr(shard_file, "sum_of", lambda data: read.append(data.numel()) or real(data))
    memory, state = ShardedMemory(tmp_path, generation=1), {"w": torch.zeros(8)}

    assert memory.newest() == memory.load(state) == (0, 1)

    assert len(read) == 1
    assert state["w"].tolist() == [7.0] * 8


def a_piece(folder: Path) -> Path:
    """The file of a snapshot of one process, of step 1 in generation 3."""
    memory = ShardedMemory(folder, generation=3)
    memory.save(1, {"w": torch.full((8,), 7.0), "n": 5})
    memory.wait()
    (path,) = folder.glob("piece-*")
    assert StoredPiece(path).piece == Piece(3, 1, 1, 0)
    return path


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("checked", [False, True])
# The mark, and of the numbers generation, step, world size, rank, a length, the layout's CRC, their own.
@pytest.mark.parametrize("offset", [0, 8, 16, 24, 28, 32, 64, 72, 80])
def test_a_flipped_bit_in_what_a_piece_says_of_itself_is_seen(tmp_path: Path, offset: int, checked: bool) -> None:
    path = a_piece(tmp_path)
    flip(path, offset)

    with pytest.raises(Torn):
        StoredPiece(path, checked=checked)


def test_a_piece_of_an_older_release_is_refused_by_its_format(tmp_path: Path) -> None:
    path = a_piece(tmp_path)
    content = path.read_bytes()
    path.write_bytes(b"elaunch1" + content[len(MARK) :])

    with pytest.raises(Torn, match="format of an older release"):
        StoredPiece(path)
    assert ShardedMemory(tmp_path, generation=4).newest() is None


@pytest.mark.parametrize("offset", [8, 130, -1])
def test_what_arrived_with_a_flipped_bit_is_never_marked(tmp_path: Path, offset: int) -> None:
    path = a_piece(tmp_path)
    flip(path, offset)
    sent = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    received = Received(tmp_path / "received", sent.numel())
    received.body().copy_(sent[len(MARK) :])

    with pytest.raises(Torn):
        received.accept(Piece(3, 1, 1, 0))

    with pytest.raises(Torn, match="not finished"):
        StoredPiece(tmp_path / "received")


def test_what_arrived_is_taken_for_the_piece_that_was_to_come_and_no_other(tmp_path: Path) -> None:
    sent = torch.frombuffer(bytearray(a_piece(tmp_path).read_bytes()), dtype=torch.uint8)
    received = Received(tmp_path / "received", sent.numel())
    received.body().copy_(sent[len(MARK) :])

    with pytest.raises(Torn, match="step=1"):
        received.accept(Piece(3, 2, 1, 0))
    received.accept(Piece(3, 1, 1, 0))

    assert StoredPiece(tmp_path / "received").piece == Piece(3, 1, 1, 0)
