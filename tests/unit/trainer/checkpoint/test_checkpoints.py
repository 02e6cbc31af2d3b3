"""Checkpoints of one process: whole or passed over, the newest by generation and step; files of older formats."""

from __future__ import annotations

import errno
import os
import pickle
import re
import threading
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.trainer.checkpoint import storage, writing
from elaunch.trainer.checkpoint.checkpoints import Checkpoints, Mark, marks
from elaunch.trainer.checkpoint.filesystem import LocalFiles
from elaunch.trainer.checkpoint.loading import Unreadable
from elaunch.trainer.checkpoint.storage import storage_at
from elaunch.trainer.state.tree import PerRank
from tests.harness import DEADLINE_S


def state_of(step: int) -> dict[str, Any]:
    momentum = {"state": {0: {"exp_avg": torch.full((3,), 0.5)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}
    return {"step": step, "loss": 2.5, "model": {"w": torch.full((50, 40), float(step))}, "optimizer": momentum}


def save(folder: Path, generation: int, step: int, state: dict[str, Any] | None = None, **options: Any) -> Path:
    Checkpoints(folder, generation=generation, log=pytest.fail, **options).save(step, state or state_of(step))
    return folder / storage_at(folder).found()[-1][1].name


def newest_step(folder: Path, logged: list[str] | None = None) -> int:
    state: dict[str, Any] = {}
    Checkpoints(folder, generation=0, log=pytest.fail if logged is None else logged.append).load_newest(state)
    return int(state.get("step", 0))


def test_what_was_saved_comes_back_in_place_and_in_kind(tmp_path: Path) -> None:
    extra = {
        "tuple": (1, None, "a"),
        "counter": Counter({30: 1}),
        "ordered": OrderedDict(a=torch.tensor(7)),
        "bytes": b"\0",
        "nested": [{"t": torch.tensor([True])}, torch.tensor(3.5, dtype=torch.bfloat16)],
        "empty": torch.empty(0, 4),
        "view": torch.arange(12.0).reshape(3, 4).t(),
        "inf": float("inf"),
    }
    save(tmp_path, 0, 7, {**state_of(7), "extra": extra})
    weights = torch.zeros(50, 40)
    state = {"model": {"w": weights}}

    mark = Checkpoints(tmp_path, generation=0, log=pytest.fail).load_newest(state)

    assert mark == Mark(0, 7)
    assert state["model"]["w"] is weights
    assert torch.equal(weights, torch.full((50, 40), 7.0))
    loaded: Any = state
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}]
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], torch.full((3,), 0.5))
    assert (loaded["step"], loaded["loss"]) == (7, 2.5)
    back = loaded["extra"]
    assert {key: back[key] for key in ("tuple", "counter", "bytes", "inf")} == {
        key: extra[key] for key in ("tuple", "counter", "bytes", "inf")
    }
    assert type(back["counter"]) is Counter
    for key in ("empty", "view"):
        assert torch.equal(back[key], extra[key])
    assert torch.equal(back["ordered"]["a"], torch.tensor(7))
    assert torch.equal(back["nested"][0]["t"], torch.tensor([True]))
    assert torch.equal(back["nested"][1], torch.tensor(3.5, dtype=torch.bfloat16))
    assert back["nested"][1].dtype == torch.bfloat16


def test_torchs_own_tools_read_a_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = save(tmp_path / "c", 0, 7)

    dcp_to_torch_save(folder, tmp_path / "one.pt")

    held = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(held["model"]["w"], torch.full((50, 40), 7.0))
    assert pickle.loads((folder / "plain.pickle").read_bytes())["plain"]["step"] == 7


def test_a_newer_generation_wins_over_a_stale_groups_later_step(tmp_path: Path) -> None:
    stale = Checkpoints(tmp_path, generation=1, log=pytest.fail)
    save(tmp_path, 2, 50)
    stale.save(90, state_of(90))

    assert newest_step(tmp_path) == 50


def test_a_job_started_anew_saves_under_a_generation_that_wins(tmp_path: Path) -> None:
    save(tmp_path, 5, 50)

    Checkpoints(tmp_path, generation=0, log=pytest.fail).save(51, state_of(51))

    assert newest_step(tmp_path) == 51
    assert marks(tmp_path) == [Mark(5, 50), Mark(5, 51)]


def test_a_step_that_is_computed_again_has_a_newer_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 0, 1)
    save(tmp_path, 0, 1, {"step": 1, "again": True})

    state: dict[str, Any] = {}
    Checkpoints(tmp_path, generation=0, log=pytest.fail).load_newest(state)
    assert state == {"step": 1, "again": True}
    assert marks(tmp_path) == [Mark(0, 1), Mark(1, 1)]


@pytest.mark.parametrize(
    ("file", "left"),
    [("__0_0.distcp", None), ("__0_0.distcp", -1), ("tensors.json", 40), ("plain.pickle", 40), ("manifest.json", 40)],
)
def test_a_torn_newest_is_named_and_the_one_before_used(tmp_path: Path, file: str, left: int | None) -> None:
    save(tmp_path, 0, 1)
    torn = save(tmp_path, 0, 2)
    if left is None:
        (torn / file).unlink()
    elif left < 0:
        content = bytearray((torn / file).read_bytes())
        content[len(content) // 2] ^= 1
        (torn / file).write_bytes(content)
    else:
        os.truncate(torn / file, left)
    logged: list[str] = []

    assert newest_step(tmp_path, logged) == 1
    assert len(logged) == 1
    assert f"skipping {torn}: it is torn or corrupt" in logged[0]
    # It does not count among the newest any more, and is not reported again.
    assert marks(tmp_path) == [Mark(0, 1)]
    assert (torn / "manifest.corrupt.json").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("file", [".metadata", "plain.pickle", "__0_0.distcp"])
def test_a_checkpoint_cannot_run_code(tmp_path: Path, file: str) -> None:
    folder = save(tmp_path / "c", 0, 1)
    (folder / file).write_bytes(pickle.dumps({"plain": Bomb(tmp_path / "ran")}))
    # An attacker would also correct the checksums.
    seal_again(folder)

    # What DCP's own tools read is never read here.
    if file == ".metadata":
        assert newest_step(tmp_path / "c", []) == 1
    else:
        with pytest.raises(Unreadable):
            newest_step(tmp_path / "c", [])

    assert not (tmp_path / "ran").exists()


def seal_again(folder: Path) -> None:
    """Write a manifest for the present contents of the folder."""
    held = storage_at(folder.parent).folder(folder.name)
    manifest = storage.read_manifest(held)
    files = {name: storage.sums(held, name) for name in manifest.files}
    held.write(storage.MANIFEST, replace(manifest, files=files).to_bytes())


def fails(monkeypatch: pytest.MonkeyPatch, error: Exception, *paths: Path) -> None:
    """Make reading these folders fail."""
    real = LocalFiles.open

    def opened(self: LocalFiles, name: str) -> Any:
        if self.name in [path.name for path in paths]:
            raise error
        return real(self, name)

    monkeypatch.setattr(LocalFiles, "open", opened)


NO_PROOF = [OSError(errno.ESTALE, os.strerror(errno.ESTALE)), RuntimeError("can't allocate memory")]


@pytest.mark.parametrize("error", NO_PROOF, ids=str)
def test_what_cannot_be_read_now_is_passed_over_and_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save(tmp_path, 0, 1)
    newest = save(tmp_path, 0, 2)
    fails(monkeypatch, error, newest)
    logged: list[str] = []

    assert newest_step(tmp_path, logged) == 1

    why = getattr(error, "strerror", error)
    assert logged == [f"skipping {newest}: it cannot be read ({why}); trying the one before it"]
    monkeypatch.undo()
    assert newest_step(tmp_path) == 2


def test_nothing_begins_anew_while_a_checkpoint_may_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path, 0, 1), save(tmp_path, 0, 2)]
    fails(monkeypatch, OSError(errno.ESTALE, "Stale file handle"), *paths)
    state = {"model": {"w": torch.zeros(50, 40)}}

    with pytest.raises(Unreadable, match=f"{paths[1]} cannot be read .*Stale file handle.*does not start over"):
        Checkpoints(tmp_path, generation=0, log=lambda _: None).load_newest(state)

    assert list(state) == ["model"]
    assert not state["model"]["w"].any()
    assert marks(tmp_path) == [Mark(0, 1), Mark(0, 2)]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"w": torch.zeros(2, 3)}, r"holds w of shape \(3,\), not \(2, 3\)"),
        ({"w": torch.zeros(3), "v": torch.zeros(1)}, "lacks v; it belongs to another model or optimizer"),
    ],
)
def test_another_models_checkpoint_is_refused_and_left_where_it_is(
    tmp_path: Path, state: dict[str, Any], reason: str
) -> None:
    save(tmp_path, 0, 1, {"w": torch.ones(3)})

    with pytest.raises(ValueError, match=reason):
        Checkpoints(tmp_path, generation=0, log=pytest.fail).load_newest(state)

    assert marks(tmp_path) == [Mark(0, 1)]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"extra": {"when": Bomb(Path())}}, "extra.when is a Bomb; only tensors and plain"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\); keys are strings or integers"),
        ({"a": PerRank(x={"n": 1})}, "a.x.n is a int; only tensors of a state are kept"),
    ],
)
def test_what_could_not_be_read_back_is_refused_at_once(tmp_path: Path, state: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        Checkpoints(tmp_path, generation=0, log=pytest.fail).save_async(1, state)


def test_what_changes_after_save_async_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()
    real = writing.write
    monkeypatch.setattr(writing, "write", lambda *given: changed.wait(DEADLINE_S) and real(*given))
    weights = torch.ones(3)
    checkpoints = Checkpoints(tmp_path, generation=0, log=pytest.fail)

    checkpoints.save_async(1, {"w": weights})
    weights.zero_()
    changed.set()
    checkpoints.wait()

    checkpoints.load_newest({"w": weights})
    assert weights.tolist() == [1, 1, 1]


def test_a_write_that_fails_leaves_the_older_ones_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    checkpoints = Checkpoints(tmp_path, generation=0, log=logged.append)
    checkpoints.save(1, state_of(1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        checkpoints.save(2, state_of(2))
    assert re.fullmatch(
        r"the checkpoint of step 2 could not be written: No space left on device"
        rf"; the newest one in {tmp_path} is of step 1",
        "".join(logged),
    )
    assert len(list(tmp_path.iterdir())) == 1

    checkpoints.save(3, state_of(3))
    assert marks(tmp_path) == [Mark(0, 1), Mark(0, 3)]
    assert logged[1:] == ["the checkpoint of step 3 is written"]
    assert checkpoints.newest_known == Mark(0, 3)


def test_everything_is_durable_before_it_counts_and_its_manifest_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append("root" if target == tmp_path else target.name)
        assert os.fstat(descriptor).st_size, target
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = save(tmp_path, 0, 1).name

    written = next(at for at, name in enumerate(synced) if "manifest.json" in name)
    assert "__0_0.distcp" in synced[:written]
    assert any("plain.pickle" in name for name in synced[:written])
    assert any(".metadata" in name for name in synced[:written])
    assert any("tensors.json" in name for name in synced[:written])
    # The names of the files, and of their folder, then that of the manifest.
    assert synced[written - 2 : written] == [folder, "root"]
    assert synced[written + 1 :] == [folder]
