"""Checkpoints that an attacker has written: none of their code runs, and none of them stops or delays a trainer."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from elaunch.trainer.checkpoint import catalog, dcp, storage, writing
from elaunch.trainer.checkpoint.checkpoints import Checkpoints, Mark, load_plain
from elaunch.trainer.checkpoint.loading import Unreadable, load_from_all
from elaunch.trainer.checkpoint.local import LocalFolder, LocalStorage
from elaunch.trainer.files import read_regular
from elaunch.trainer.ranks.agreement import Ranks
from tests.fuzzing import bounded

DCP = "torch.distributed.checkpoint.metadata"
NEST = 3_000_000
Change = Callable[[Path], None]


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


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((3, 2), float(step))}}


def save(folder: Path, step: int) -> Path:
    Checkpoints(folder, generation=0, say=pytest.fail).save(step, state_of(step))
    return folder / Mark(0, step).folder_name


def newest_step(folder: Path, said: list[str]) -> int:
    state = state_of(0)
    with in_time():
        Checkpoints(folder, generation=0, say=said.append).load_newest(state)
    return int(state["step"])


def seal_again(folder: Path) -> None:
    """Write a manifest for the present contents of the folder, as an attacker would."""
    held = LocalFolder(folder)
    manifest = catalog.read_manifest(held)
    files = {name: held.sums(name) for name in manifest.files}
    held.write(catalog.MANIFEST, replace(manifest, files=files).to_bytes())


# Pickles by hand, of protocol 2.


def plain(value: object) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def fields(**values: bytes) -> bytes:
    return b"}(" + b"".join(plain(name) + value for name, value in values.items()) + b"u"


def by_key(pairs: list[tuple[object, bytes]]) -> bytes:
    return b"}(" + b"".join(plain(key) + value for key, value in pairs) + b"u"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def poison(folder: Path, ran: Path) -> None:
    """Tensors at the first look; bytes at the second, which torch unpickles: attributes are set on what is named."""
    metadata = dcp.loads((folder / ".metadata").read_bytes())
    bomb = pickle.dumps(Bomb(ran), 2)
    data = folder / "__0_0.distcp"
    place = _StorageInfo(data.name, data.stat().st_size, len(bomb))
    with data.open("ab") as file:
        file.write(bomb)
    tensor, layout = named(DCP, "TensorStorageMetadata"), named("torch.serialization", "_get_layout")
    entries: list[tuple[object, bytes]] = [
        (name, tensor + b")\x81" + fields(**{key: plain(value) for key, value in vars(entry).items()}) + b"b")
        for name, entry in metadata.state_dict_metadata.items()
    ]
    places: list[tuple[object, bytes]] = [(MetadataIndex(name), plain(place)) for name in metadata.state_dict_metadata]
    content = named(DCP, "Metadata") + b")\x81"
    content += fields(
        state_dict_metadata=by_key(entries), planner_data=plain(metadata.planner_data), storage_data=by_key(places)
    )
    content += b"b" + layout + b"}" + plain("cache") + b"}("
    content += tensor + named(DCP, "BytesStorageMetadata") + b")\x81" + plain("torch.strided") + plain(torch.strided)
    content += b"usb0" + tensor + b"N}" + plain("__new__") + layout + b"s\x86b0"
    (folder / ".metadata").write_bytes(b"\x80\x02" + content + b".")
    seal_again(folder)


@pytest.mark.parametrize("of_all", [False, True], ids=["of rank 0", "of all ranks"])
def test_a_checkpoint_that_sets_attributes_of_classes_runs_nothing(tmp_path: Path, of_all: bool) -> None:
    save(tmp_path / "c", 1)
    poison(save(tmp_path / "c", 2), tmp_path / "ran")
    said: list[str] = []
    new = TensorStorageMetadata.__new__
    state = state_of(0)

    if of_all:
        mark = load_from_all(LocalStorage(tmp_path / "c"), state, Ranks(None), said.append)
    else:
        mark = Checkpoints(tmp_path / "c", generation=0, say=said.append).load_newest(state)

    assert mark == Mark(0, 1)
    assert not (tmp_path / "ran").exists()
    assert "has no place in a checkpoint" in "".join(said)
    assert TensorStorageMetadata.__new__ is new
    assert TensorStorageMetadata not in getattr(torch.serialization._get_layout, "cache", {})


@pytest.mark.parametrize(
    "owner",
    [
        named(DCP, "TensorStorageMetadata"),
        named(DCP, "_MEM_FORMAT_ENCODING"),
        named("torch.serialization", "_get_layout"),
        named("torch", "Size"),
        named("torch", "float32"),
        named("pathlib", "PosixPath"),
    ],
    ids=lambda owner: owner.split()[-1].decode(),
)
@pytest.mark.parametrize("state", [b"}U\x01ax", b"N}X\x01\x00\x00\x00aX\x01\x00\x00\x00bs\x86", fields(a=plain("b"))])
def test_what_a_checkpoint_names_gets_no_state(owner: bytes, state: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        dcp.loads(b"\x80\x02" + owner + state + b"b.")


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1},
        Path("/"),
        named,
        print,
        TensorStorageMetadata,
        b"bytes",
        1.5,
        {1, 2},
        OSError("x"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_is_no_record_is_none(value: object, protocol: int) -> None:
    with pytest.raises(pickle.UnpicklingError):
        dcp.loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_record_is_read_whole_whatever_pickle_wrote_it(tmp_path: Path, protocol: int) -> None:
    folder = save(tmp_path, 1)
    metadata = pickle.loads((folder / ".metadata").read_bytes())

    read = dcp.loads(pickle.dumps(metadata, protocol))

    assert read == replace(metadata, storage_meta=None)
    assert list(read.storage_data.values()) == list(metadata.storage_data.values())
    assert [index.index for index in read.storage_data] == [index.index for index in metadata.storage_data]


def metadata_with(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(folder)


def lies_in(path: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    return change


@pytest.mark.parametrize("path", ["../x/__0_0.distcp", "/etc/passwd", "..", "x/../y", "", "another"])
def test_a_tensor_lies_in_a_file_of_the_checkpoint(tmp_path: Path, path: str) -> None:
    folder = save(tmp_path, 1)
    (folder / "another").write_bytes((folder / "__0_0.distcp").read_bytes())
    metadata_with(folder, lies_in(path))

    with pytest.raises(Unreadable, match=r"no file of the checkpoint|in place of a file's name"):
        newest_step(tmp_path, [])


def behind(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = 1 << 40


def negative(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = -1


def outside(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].chunks[0].offsets = torch.Size([1, 1])


def transformed(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def itself(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"] = metadata


def in_itself(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].size = metadata.state_dict_metadata["model.w"]


@pytest.mark.parametrize("change", [behind, negative, outside, transformed, itself, in_itself])
def test_metadata_that_cannot_be_true_is_passed_over(tmp_path: Path, change: Callable[[Any], None]) -> None:
    save(tmp_path, 1)
    metadata_with(save(tmp_path, 2), change)
    said: list[str] = []

    assert newest_step(tmp_path, said) == 1

    assert "cannot be read" in "".join(said)


def test_bytes_that_are_no_tensor_are_never_unpickled(tmp_path: Path) -> None:
    index = MetadataIndex("model.w")
    item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size([0]), index, torch.Size([0]), torch.Size([0]))

    with pytest.raises(pickle.UnpicklingError, match=r"model\.w is no tensor"):
        dcp._LoadPlanner(flatten_state_dict=False).load_bytes(item, pytest.fail)  # type: ignore[arg-type]


def test_what_was_verified_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1)
    read = LocalFolder.read

    def and_change(self: LocalFolder, name: str, *limit: int) -> bytes:
        content = read(self, name, *limit)
        if name in (".metadata", "plain.pt"):
            (folder / name).write_bytes(b"another")
        return content

    monkeypatch.setattr(LocalFolder, "read", and_change)

    assert newest_step(tmp_path, []) == 1
    assert (folder / ".metadata").read_bytes() == (folder / "plain.pt").read_bytes() == b"another"


# Files that are none, too large, or nested without end.


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def of_40_gb(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(40 << 30)


@pytest.mark.parametrize("change", [a_pipe, a_device, a_folder])
@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "plain.pt", "__0_0.distcp"])
def test_what_is_no_regular_file_is_passed_over(tmp_path: Path, name: str, change: Change) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest / name).unlink()
    change(newest / name)
    said: list[str] = []

    assert newest_step(tmp_path, said) == 1

    assert len(said) == 1
    assert said[0].startswith(f"skipping {newest}: it cannot be read (")
    assert name in said[0] or "directory" in said[0]


@pytest.mark.parametrize(
    ("name", "limit"), [("manifest.json", "67,108,864"), (".metadata", "1,073,741,824"), ("plain.pt", "1,073,741,824")]
)
def test_a_file_that_is_too_large_is_passed_over_with_the_number(tmp_path: Path, name: str, limit: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    of_40_gb(newest / name)
    said: list[str] = []

    assert newest_step(tmp_path, said) == 1

    why = f"{name} has 42,949,672,960 bytes, more than the {limit} that one may have"
    assert said == [f"skipping {newest}: it cannot be read ({why}); trying the one before it"]


def test_a_single_file_that_is_a_pipe_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    a_pipe(tmp_path / Mark(0, 2).file_name)
    said: list[str] = []

    assert newest_step(tmp_path, said) == 1

    assert "is no regular file" in said[0]


def test_a_plain_file_that_is_a_pipe_is_said(tmp_path: Path) -> None:
    a_pipe(tmp_path / "plain.pt")

    with in_time(), pytest.raises(OSError, match=r"plain\.pt is no regular file"):
        load_plain(tmp_path / "plain.pt", torch.nn.Linear(1, 1))


def test_a_folder_behind_a_symbolic_link_is_loaded_and_a_plain_file_too(tmp_path: Path) -> None:
    save(tmp_path / "there", 1)
    (tmp_path / "here").symlink_to(tmp_path / "there")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / Mark(0, 1).folder_name).symlink_to(tmp_path / "there" / Mark(0, 1).folder_name)
    model = torch.nn.Linear(1, 1)
    torch.save(model.state_dict(), tmp_path / "real.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")

    assert newest_step(tmp_path / "here", []) == 1
    assert newest_step(tmp_path / "one", []) == 1
    assert load_plain(tmp_path / "link.pt", model) == {}


def test_a_file_that_grows_while_it_is_read_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(11))
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((0o100600, *[0] * 9)))

    with pytest.raises(OSError, match="more than the 10"):
        read_regular(tmp_path / "a", 10)


def test_a_checkpoint_that_nobody_would_read_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(writing, "METADATA_BYTES_MAX", 100)
    said: list[str] = []

    Checkpoints(tmp_path, generation=0, say=said.append).save(2, state_of(2))

    assert "could not be written: .metadata has" in said[0]
    assert catalog.marks(tmp_path) == [Mark(0, 1)]


def nested(opening: bytes, closing: bytes) -> bytes:
    return b"\x80\x02}" + opening * NEST + b")" + closing * NEST + b"Ns."


@pytest.mark.parametrize("closing", [b"\x85", b"t"], ids=["pairs", "marked"])
def test_metadata_that_nests_without_end_is_no_record(closing: bytes) -> None:
    with in_time(), pytest.raises(pickle.UnpicklingError):
        dcp.loads(nested(b"(" if closing == b"t" else b"", closing))


@pytest.mark.parametrize("file", [".metadata", "plain.pt", "__0_0.distcp"])
def test_a_file_that_nests_without_end_is_passed_over(tmp_path: Path, file: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    content = nested(b"", b"\x85")
    if file == ".metadata":
        (newest / file).write_bytes(content)
    else:
        replace_pickle(newest / file, content)
    if file == "__0_0.distcp":
        length = (newest / file).stat().st_size
        metadata_with(newest, lambda metadata: lies_whole(metadata, length))
    seal_again(newest)
    said: list[str] = []

    assert newest_step(tmp_path, said) == 1

    assert "nests" in said[0]


def lies_whole(metadata: Any, length: int) -> None:
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, length


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
        Checkpoints(url, generation=0, say=pytest.fail).save(step, state_of(step))
    newest = catalog.found(url)[-1][1]
    padding = newest.read(catalog.MANIFEST, 1 << 20) + b" " * 10_000
    newest.write(catalog.MANIFEST, padding)
    monkeypatch.setattr(catalog, "MANIFEST_BYTES_MAX", 9_000)
    fetched: list[str] = []
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, **options: Any) -> Any:
        fetched.append(path)
        return real(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    said: list[str] = []
    state = state_of(0)

    Checkpoints(url, generation=0, say=said.append).load_newest(state)

    assert state["step"] == 1
    assert "more than the 9,000 that one may have" in said[0]
    assert not [path for path in fetched if newest.name in path]
    assert storage.MANIFEST_BYTES_MAX == 64 << 20
