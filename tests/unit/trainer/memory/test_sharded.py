"""Snapshots of a sharded state, of one process: which of two versions is written over, and what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elaunch.trainer.memory.sharded import ShardedMemory
from elaunch.trainer.memory.slots import Slot, Torn
from elaunch.trainer.state import region
from elaunch.trainer.state.region import MARK, Piece, Version

PIECE = Piece(Version(3, 1), world_size=1, rank=0)


def newest(memory: ShardedMemory) -> Version | None:
    choice = memory.find()
    return choice and choice.version


def test_a_snapshot_that_failed_is_written_over_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("raised by the test")

    logged: list[str] = []
    memory, state = ShardedMemory(tmp_path, log=logged.append, generation=0), {"w": torch.zeros(8)}
    memory.save(1, state)
    assert memory.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "finish", full)
        memory.save(2, state)
        assert not memory.wait()

    # Simulate a kill before the next snapshot is whole.
    monkeypatch.setattr(region, "mark", lambda region: None)
    memory.save(3, state)
    memory.wait()

    assert logged == ["rank 0's part of the snapshot is not whole: raised by the test"]
    assert newest(ShardedMemory(tmp_path, generation=1)) == Version(0, 1)


def test_what_is_loaded_after_a_save_is_what_was_saved(tmp_path: Path) -> None:
    memory, state = ShardedMemory(tmp_path, generation=0), {"w": torch.zeros(8)}
    assert memory.load(state) is None
    for step in (1, 2, 3):
        state["w"].fill_(step)
        memory.save(step, state)
        memory.wait()
        state["w"].zero_()

        assert memory.load(state) == Version(0, step)
        assert state["w"].tolist() == [step] * 8


def a_piece(folder: Path) -> Path:
    """The file of a snapshot of one process, of step 1 in generation 3."""
    memory = ShardedMemory(folder, generation=3)
    memory.save(1, {"w": torch.full((8,), 7.0), "n": 5})
    memory.wait()
    (path,) = folder.glob("piece-*")
    header = Slot(path, bytes(16)).header()
    assert header
    assert header.piece == PIECE
    return path


def sent(path: Path, folder: Path) -> Slot:
    """A slot that has received the piece at `path`."""
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    slot = Slot(folder / "received", bytes(16))
    slot.grow(content.numel())
    slot.raw(content.numel())[len(MARK) :].copy_(content[len(MARK) :])
    return slot


@pytest.mark.parametrize(
    "other", [Piece(Version(3, 2), 1, 0), Piece(Version(3, 1), 1, 1), Piece(Version(3, 1), 2, 0), Version(2, 1)]
)
def test_what_arrived_is_taken_for_the_piece_that_was_to_come_and_no_other(
    tmp_path: Path, other: Piece | Version
) -> None:
    slot = sent(a_piece(tmp_path), tmp_path)

    with pytest.raises(Torn, match="step=1"):
        slot.accept(other, 1)
    assert slot.header() is None
    slot.accept(PIECE, 1)

    assert slot.header() is not None


def test_a_part_that_arrives_garbled_does_not_count(tmp_path: Path) -> None:
    slot = sent(a_piece(tmp_path), tmp_path)
    slot.region()[-4096] ^= 1

    with pytest.raises(Torn, match="its checksum is wrong"):
        slot.accept(PIECE, 1)
    assert slot.header() is None


def copying(folder: Path) -> tuple[ShardedMemory, torch.Tensor]:
    """A memory with a snapshot of step 1 in generation 0, and the tensor that the training changes."""
    memory, weights = ShardedMemory(folder, generation=0), torch.full((8,), 1.0)
    memory.save(1, {"w": weights}, {"rate": 0.1}, [weights])
    assert not memory.is_refused
    assert memory.can_copy
    return memory, weights


def test_a_copy_has_the_present_tensors_and_the_small_values_and_takes_turns_with_the_one_before(
    tmp_path: Path,
) -> None:
    memory, weights = copying(tmp_path)
    for step in (2, 3, 4):
        weights.fill_(step)
        assert memory.copy(step, {"rate": 0.1 * step}, [weights])

    headers = [Slot(path, bytes(16)).header() for path in tmp_path.glob("piece-*")]
    assert {header.version.step for header in headers if header} == {3, 4}
    back = {"w": torch.zeros(8)}
    assert ShardedMemory(tmp_path, generation=1).load(back) == Version(0, 4)
    assert back["w"].tolist() == [4] * 8
    assert back["rate"] == 0.4


def test_whoever_is_killed_in_a_copy_leaves_the_copy_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, weights = copying(tmp_path)
    for step in (2, 3):
        assert memory.copy(step, {}, [weights])
    monkeypatch.setattr(region, "mark", lambda region: None)
    memory.copy(4, {}, [weights])
    # A snapshot must not overwrite it either.
    memory.save(5, {"w": weights})

    assert newest(ShardedMemory(tmp_path, generation=1)) == Version(0, 3)


def test_a_tensor_that_was_replaced_is_never_copied_from_its_old_place(tmp_path: Path) -> None:
    memory, weights = copying(tmp_path)
    other = torch.full((8,), 7.0)

    assert not memory.copy(2, {}, [other])
    assert not memory.can_copy
    assert not memory.copy(3, {}, [weights])
    assert newest(memory) == Version(0, 1)
    memory.save(4, {"w": other}, {}, [other])
    other.fill_(8)
    assert memory.copy(5, {}, [other])

    back = {"w": torch.zeros(8)}
    assert ShardedMemory(tmp_path, generation=1).load(back) == Version(0, 5)
    assert back["w"].tolist() == [8] * 8


def test_a_snapshot_of_a_step_that_is_copied_is_there_already_on_one_node(tmp_path: Path) -> None:
    memory, weights = copying(tmp_path)
    assert memory.copy(2, {}, [weights])

    assert memory.copied == Version(0, 2)
