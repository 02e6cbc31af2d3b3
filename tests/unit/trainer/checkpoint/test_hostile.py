"""Checkpoints that an attacker has written: none of their code runs, and none of them stops or delays a trainer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.trainer.checkpoint import layout, storage, writing
from elaunch.trainer.checkpoint.checkpoints import Checkpoints, Mark
from elaunch.trainer.checkpoint.filesystem import LocalFiles
from elaunch.trainer.checkpoint.storage import storage_at
from tests.fuzzing import bounded
from tests.unit.trainer.checkpoint.test_checkpoints import save, seal_again, state_of

NEST = 3_000_000


@contextmanager
def in_time() -> Iterator[None]:
    """Fails if the body waits for ever, or takes more time and memory than reading a small checkpoint does."""

    def waited(*_: object) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    try:
        # torch's threads reserve room for their stacks.
        with bounded(cpu_s=20, memory_bytes=8 << 30):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def newest_step(folder: Path, logged: list[str]) -> int:
    state = state_of(0)
    with in_time():
        Checkpoints(folder, generation=0, log=logged.append).load_newest(state)
    return int(state["step"])


def passed_over(folder: Path, spoil: Callable[[Path], object]) -> tuple[Path, str]:
    """The newest of two checkpoints, which `spoil` has changed, and the one sentence about it; the other is loaded."""
    save(folder, 0, 1, state_of(1))
    newest = save(folder, 0, 2, state_of(2))
    spoil(newest)
    logged: list[str] = []
    assert newest_step(folder, logged) == 1
    (sentence,) = logged
    return newest, sentence


def change_layout(checkpoint: Path, change: Callable[[Any], object]) -> None:
    tensors = json.loads((checkpoint / "tensors.json").read_text())
    change(tensors["model.w"])
    (checkpoint / "tensors.json").write_text(json.dumps(tensors))
    seal_again(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["chunks"][0].__setitem__(2, "../x/__0_0.distcp"),
        lambda entry: entry["chunks"][0].__setitem__(2, "/etc/passwd"),
        lambda entry: entry["chunks"][0].__setitem__(2, "another"),
        lambda entry: entry["chunks"][0].__setitem__(2, ["__0_0.distcp"]),
        lambda entry: entry["chunks"][0].__setitem__(3, 1 << 40),
        lambda entry: entry["chunks"][0].__setitem__(3, -1),
        lambda entry: entry["chunks"][0].__setitem__(4, 1.0),
        lambda entry: entry["chunks"][0].__setitem__(0, [1, 1]),
        lambda entry: entry["chunks"][0].__setitem__(1, [3]),
        lambda entry: entry.update(dtype="load"),
        lambda entry: entry.update(dtype=["float32"]),
        lambda entry: entry.update(size=[-3, -2]),
        lambda entry: entry.update(size=["3", 2]),
        lambda entry: entry.update(path=None),
        lambda entry: entry.pop("chunks"),
    ],
)
def test_a_layout_that_cannot_be_true_is_passed_over(tmp_path: Path, change: Callable[[Any], None]) -> None:
    def spoil(newest: Path) -> None:
        (newest / "another").write_bytes((newest / "__0_0.distcp").read_bytes())
        change_layout(newest, change)

    assert "cannot be read" in passed_over(tmp_path, spoil)[1]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * NEST, b'{"model.w": 1}', b"\xff"])
def test_a_layout_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    with in_time(), pytest.raises(ValueError, match=r"\w"):
        layout.contents(storage_at(tmp_path).folder("x"), content, {})


def test_what_was_verified_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 0, 1, state_of(1))
    read = LocalFiles.read

    def and_change(self: LocalFiles, name: str, *limit: int) -> bytes:
        content = read(self, name, *limit)
        if name in ("tensors.json", "plain.pickle"):
            (folder / name).write_bytes(b"another")
        return content

    monkeypatch.setattr(LocalFiles, "read", and_change)

    assert newest_step(tmp_path, []) == 1
    assert (folder / "tensors.json").read_bytes() == (folder / "plain.pickle").read_bytes() == b"another"


# Files that are none, too large, or nested without end.


@pytest.mark.parametrize(
    "change",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir],
    ids=["a_pipe", "a_device", "a_folder"],
)
@pytest.mark.parametrize("name", ["manifest.json", "plain.pickle", "__0_0.distcp"])
def test_what_is_no_regular_file_is_passed_over(tmp_path: Path, name: str, change: Callable[[Path], None]) -> None:
    def spoil(newest: Path) -> None:
        (newest / name).unlink()
        change(newest / name)

    newest, logged = passed_over(tmp_path, spoil)

    assert logged.startswith(f"skipping {newest}: it cannot be read (")
    assert name in logged or "directory" in logged


@pytest.mark.parametrize(
    ("name", "limit"),
    [("manifest.json", "67,108,864"), ("tensors.json", "1,073,741,824"), ("plain.pickle", "1,073,741,824")],
)
def test_a_file_that_is_too_large_is_passed_over_with_the_number(tmp_path: Path, name: str, limit: str) -> None:
    newest, logged = passed_over(tmp_path, lambda newest: os.truncate(newest / name, 40 << 30))

    why = f"{name} has 42,949,672,960 bytes, more than the limit of {limit}"
    assert logged == f"skipping {newest}: it cannot be read ({why}); trying the one before it"


def test_a_checkpoint_that_no_rank_would_read_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 0, 1, state_of(1))
    monkeypatch.setattr(writing, "LAYOUT_BYTES_MAX", 100)
    logged: list[str] = []

    Checkpoints(tmp_path, generation=0, log=logged.append).save(2, state_of(2))

    assert "could not be written: tensors.json has" in logged[0]
    assert storage.marks(tmp_path) == [Mark(0, 1)]


@pytest.mark.parametrize("file", ["plain.pickle", "__0_0.distcp"])
def test_a_file_that_nests_without_end_is_passed_over(tmp_path: Path, file: str) -> None:
    content = b"\x80\x02})" + b"\x85" * NEST + b"Ns."

    def spoil(newest: Path) -> None:
        if file == "plain.pickle":
            (newest / file).write_bytes(content)
            seal_again(newest)
        else:
            replace_pickle(newest / file, content)
            size = (newest / file).stat().st_size
            change_layout(newest, lambda entry: entry["chunks"][0].__setitem__(slice(3, None), (0, size)))

    assert "nests more than" in passed_over(tmp_path, spoil)[1]


def replace_pickle(path: Path, content: bytes) -> None:
    """A file of torch.save with another pickle in it."""
    archive = torch._C.PyTorchFileWriter(str(path))
    archive.write_record("data.pkl", content, len(content))
    archive.write_record("byteorder", b"little", 6)
    archive.write_end_of_file()


# The object store.


def test_an_object_that_is_too_large_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    url = "memory://bucket/too-large"
    for step in (1, 2):
        Checkpoints(url, generation=0, log=pytest.fail).save(step, state_of(step))
    newest = storage.storage_at(url).found()[-1][1]
    padding = newest.read(storage.MANIFEST, 1 << 20) + b" " * 10_000
    newest.write(storage.MANIFEST, padding)
    monkeypatch.setattr(storage, "MANIFEST_BYTES_MAX", 9_000)
    fetched: list[str] = []
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, **options: Any) -> Any:
        fetched.append(path)
        return real(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    logged: list[str] = []
    state = state_of(0)

    Checkpoints(url, generation=0, log=logged.append).load_newest(state)

    assert state["step"] == 1
    assert "more than the limit of 9,000" in logged[0]
    assert not [path for path in fetched if newest.name in path]
