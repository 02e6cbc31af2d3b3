"""Checkpoints: whole or passed over, the newest by generation and step."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch

from elaunch.trainer.checkpoint import Mark, fencing_generation, load_newest, marks, save, tensors_sha256, unpack
from elaunch.trainer.files import sweep, write_durably

CPU = torch.device("cpu")


def state_of(step: int) -> dict[str, object]:
    momentum = {"state": {0: {"exp_avg": torch.full((3,), 0.5)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}
    return {"step": step, "loss": 2.5, "model": {"w": torch.full((50, 40), float(step))}, "optimizer": momentum}


def newest_step(folder: Path, said: list[str] | None = None) -> int:
    content = load_newest(folder, [].append if said is None else said.append)
    return unpack(content, CPU)["step"] if content else 0


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save(tmp_path, Mark(0, 7), state_of(7))

    state = unpack(load_newest(tmp_path, pytest.fail), CPU)

    assert torch.equal(state["model"]["w"], torch.full((50, 40), 7.0))
    assert state["optimizer"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}]
    assert (state["step"], state["loss"]) == (7, 2.5)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path, pytest.fail) == b""


def test_only_the_newest_three_stay(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, Mark(0, step), state_of(step))

    assert marks(tmp_path) == [Mark(0, 3), Mark(0, 4), Mark(0, 5)]


def test_a_newer_generation_wins_over_a_stale_groups_later_step(tmp_path: Path) -> None:
    save(tmp_path, Mark(2, 50), state_of(50))
    save(tmp_path, Mark(1, 90), state_of(90))

    assert newest_step(tmp_path) == 50


def test_a_job_started_anew_saves_under_a_generation_that_wins(tmp_path: Path) -> None:
    save(tmp_path, Mark(5, 50), state_of(50))

    save(tmp_path, Mark(fencing_generation(tmp_path, 0), 51), state_of(51))

    assert newest_step(tmp_path) == 51
    assert fencing_generation(tmp_path, 6) == 6


@pytest.mark.parametrize("left", [0, 1, 5000, 8000])
def test_a_torn_newest_is_named_and_the_one_before_used(tmp_path: Path, left: int) -> None:
    save(tmp_path, Mark(0, 1), state_of(1))
    torn = save(tmp_path, Mark(0, 2), state_of(2))
    os.truncate(torn, left)
    said: list[str] = []

    assert newest_step(tmp_path, said) == 1
    assert len(said) == 1
    assert str(torn) in said[0]
    # Out of the way: neither counted among the newest nor complained about again.
    assert marks(tmp_path) == [Mark(0, 1)]
    assert torn.with_name(torn.name + ".corrupt").exists()


def test_a_flipped_bit_in_a_tensor_is_seen(tmp_path: Path) -> None:
    save(tmp_path, Mark(0, 1), state_of(1))
    flipped = save(tmp_path, Mark(0, 2), state_of(2))
    content = bytearray(flipped.read_bytes())
    content[content.index(struct.pack("<f", 2.0) * 100) + 40] ^= 1
    flipped.write_bytes(content)
    said: list[str] = []

    assert newest_step(tmp_path, said) == 1
    assert "torn or corrupt" in said[0]


def test_a_checkpoint_under_another_steps_name_is_passed_over(tmp_path: Path) -> None:
    path = save(tmp_path, Mark(0, 1), state_of(1))
    path.rename(tmp_path / Mark(0, 9).file_name)

    assert newest_step(tmp_path) == 0


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"step": 1, "sha256": "", "bomb": Bomb()}, tmp_path / Mark(0, 1).file_name)
    (tmp_path / Mark(0, 2).file_name).write_bytes(pickle.dumps(Bomb(), protocol=2))

    assert newest_step(tmp_path) == 0
    assert not (tmp_path / "ran").exists()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "file", b"new")

    assert (tmp_path / "file").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_content_is_durable_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(("folder" if target == tmp_path else "content", (tmp_path / "file").exists()))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_durably(tmp_path / "file", b"new")

    assert synced == [("content", False), ("folder", True)]


def test_what_a_killed_writer_left_is_ignored_and_swept(tmp_path: Path) -> None:
    save(tmp_path, Mark(0, 1), state_of(1))
    (tmp_path / f".{Mark(0, 2).file_name}.4711.tmp").write_bytes(b"half")

    assert newest_step(tmp_path) == 1
    sweep(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [Mark(0, 1).file_name]


def test_the_digest_is_over_raw_bytes_in_order() -> None:
    tensors = [torch.tensor([[1.5, -2.0], [0.25, 8.0]]).t(), torch.tensor([3], dtype=torch.int64), torch.empty(0)]

    raw = struct.pack("<4f", 1.5, 0.25, -2.0, 8.0) + struct.pack("<q", 3)
    assert tensors_sha256(tensors) == hashlib.sha256(raw).hexdigest()
    assert tensors_sha256(reversed(tensors)) != hashlib.sha256(raw).hexdigest()
