"""The parts of `torch.distributed.checkpoint` (DCP) that a checkpoint consists of, without its collectives.

DCP's own `save` and `load` agree between ranks by collectives in whatever thread they run, which no other thread may
disturb and in which a survivor of a failure waits for minutes. Here its planners, its writer and its reader are called
one by one; who agrees with whom, and when, is the caller's. The files are DCP's, readable with its tools.

DCP trusts what it reads: `.metadata` is a pickle, written for DCP's tools and never read here. What it says is in
`tensors.json` too, and of that DCP's records are made: each chunk lies in its tensor, and in a file of the checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from elaunch.strict_json import parse_json
from elaunch.trainer.checkpoint.storage import LAYOUT, Folder
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import tree
from elaunch.trainer.state.pickles import require_shallow

_SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """Which tensors this rank writes; `metadata` (rank 0's, None elsewhere) says where all of them are."""

    items: SavePlan
    metadata: records.Metadata | None


def plan(tensors: Mapping[str, Tensor], paths: Mapping[str, tree.Path], ranks: Peers | None) -> Plan:
    """Share the writing among these ranks, which all call this. With None this process writes everything.

    If several ranks have the same data, one of them writes it.
    """
    planner = DefaultSavePlanner()
    leads = ranks is None or ranks.leads
    planner.set_up_planner(dict(tensors), is_coordinator=leads)
    # DCP's converters make a nested dictionary of the tensors with this.
    planner.mappings = {name: tuple(map(str, path)) for name, path in paths.items()}
    local = planner.create_local_plan()
    plans = [local] if ranks is None else ranks.to_rank_0(local)
    metadata = None
    shares: list[SavePlan] | None = None
    if plans is not None:
        shares, metadata = planner.create_global_plan(plans)
        shares = FileSystemWriter("unused").prepare_global_plan(shares)
    if ranks is not None:
        shares = ranks.from_rank_0(shares)
    assert shares is not None
    return Plan(shares[0 if ranks is None else ranks.rank], metadata)


@dataclass(frozen=True)
class Part:
    """What one rank has written: DCP's account of it, and length and CRC-32 of each file by name."""

    results: list[WriteResult]
    files: dict[str, tuple[int, int]]


class Staging:
    """Copies in host memory of the tensors to be written; the memory is used again by the next checkpoint."""

    def __init__(self) -> None:
        self._copies: dict[records.MetadataIndex, Tensor] = {}

    def copy(self, items: SavePlan, tensors: Mapping[str, Tensor]) -> None:
        """Copy what `items` lists; on return the originals may change. Tensors of a GPU are copied by its queue."""
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors))
        kept = self._copies
        self._copies = {}
        devices = set()
        for item in items.items:
            original = planner.lookup_object(item.index).detach()
            copy = kept.get(item.index)
            if copy is None or copy.shape != original.shape or copy.dtype != original.dtype:
                copy = torch.empty(original.shape, dtype=original.dtype, pin_memory=original.is_cuda)
            copy.copy_(original, non_blocking=original.is_cuda)
            self._copies[item.index] = copy
            if original.is_cuda:
                devices.add(original.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    # SavePlanner's way for a writer to get at the data.
    def resolve_data(self, item: WriteItem) -> Tensor:
        return self._copies[item.index]


def write(folder: Folder, items: SavePlan, staging: Staging) -> Part:
    """Write this rank's tensors durably to files in `folder`.

    Raises OSError, also where torch has made something else of the one that a full disk raises.
    """
    disk = _Files(folder)
    try:
        writer = _writer(disk)
        results = writer.write_data(items, staging).wait()  # type: ignore[arg-type]
    except Exception:
        if disk.error is not None:
            raise disk.error from None
        raise
    return Part(results, disk.files)


def finish(folder: Folder, metadata: records.Metadata, parts: Sequence[Part]) -> Part:
    """Write `.metadata` and `tensors.json`, which say where everything is; on rank 0, when all `parts` are there."""
    disk = _Files(folder)
    _writer(disk).finish(metadata, [part.results for part in parts])
    layout = _described(metadata)
    folder.write(LAYOUT, layout)
    return Part([], {**disk.files, LAYOUT: (len(layout), zlib.crc32(layout))})


def _described(metadata: records.Metadata) -> bytes:
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, records.TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            place = metadata.storage_data[records.MetadataIndex(name, chunk.offsets)]
            where = place.relative_path, place.offset, place.length
            chunks.append((list(chunk.offsets), list(chunk.sizes), *where))
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        path = metadata.planner_data[name]
        tensors[name] = {"dtype": dtype, "size": list(entry.size), "path": path, "chunks": chunks}
    return json.dumps(tensors).encode()


@dataclass(frozen=True)
class Contents:
    """What `tensors.json` says of a checkpoint in `folder`: its tensors, and where they lie in its `files`."""

    folder: Folder
    metadata: records.Metadata
    files: frozenset[str]

    @property
    def kinds(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Size and type of each tensor by its name."""
        found = {}
        for name, entry in self.metadata.state_dict_metadata.items():
            assert isinstance(entry, records.TensorStorageMetadata)
            found[name] = (entry.size, entry.properties.dtype)
        return found

    @property
    def paths(self) -> dict[str, tree.Path]:
        """The path of each tensor by its name, all keys as strings."""
        paths: dict[str, tree.Path] = self.metadata.planner_data
        return paths

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill `targets`, DTensors too, however many ranks have written the checkpoint."""
        reader = _Reader(self.folder, self.files)
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=True)
        planner.set_up_planner(dict(targets), self.metadata)
        items = planner.finish_plan(planner.create_local_plan())
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        reader.read_data(items, planner).wait()


def contents(folder: Folder, layout: bytes, lengths: Mapping[str, int]) -> Contents:
    """What the bytes of `tensors.json` say; `lengths` are those of all files in the folder by name.

    Raises ValueError for what `finish` has not written.
    """
    found = records.Metadata({}, planner_data={}, storage_data={})
    try:
        for name, entry in parse_json(layout).items():
            size, properties = torch.Size(entry["size"]), records.TensorProperties(dtype=_dtype(entry["dtype"]))
            chunks = []
            for offsets, sizes, file, at, length in entry["chunks"]:
                chunk = records.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                _require_inside(name, chunk, size)
                if (
                    type(at) is not int
                    or type(length) is not int
                    or not 0 <= at <= at + length <= lengths.get(file, -1)
                ):
                    raise ValueError(f"{name} is said to lie in {file!r:.200}, or a place of it, that is not there")
                chunks.append(chunk)
                found.storage_data[records.MetadataIndex(name, chunk.offsets)] = _StorageInfo(file, at, length)
            found.state_dict_metadata[name] = records.TensorStorageMetadata(properties, size, chunks)
            found.planner_data[name] = tuple(map(str, entry["path"]))
    except (AttributeError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{LAYOUT} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
    return Contents(folder, found, frozenset(lengths))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name:.80} is no type of tensors")
    return found


def _require_inside(name: str, chunk: records.ChunkStorageMetadata, size: torch.Size) -> None:
    bounds = list(zip(chunk.offsets, chunk.sizes, size, strict=False))
    is_alike = len(chunk.offsets) == len(chunk.sizes) == len(size)
    if not is_alike or min(size, default=0) < 0 or any(not 0 <= at <= at + many <= most for at, many, most in bounds):
        raise ValueError(f"{name} has a chunk that does not lie in its tensor of shape {tuple(size)}")


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """DCP's would unpickle them, whatever they are."""
        raise pickle.UnpicklingError(f"{read_item.storage_index.fqn} is no tensor")


class _Reader(FileSystemReader):
    def __init__(self, folder: Folder, files: frozenset[str]) -> None:
        super().__init__("unused")
        self._folder = folder
        self.fs = _Files(folder, readable=files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> records.Metadata:
        """Torch's unpickles the file."""
        raise NotImplementedError

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        if self._folder.files.is_remote or sinfo.length <= _SMALL_BYTES:
            # torch reads a tensor's end first, then its beginning: once over the network is enough. Of a small one
            # each look costs more than its bytes.
            file.seek(sinfo.offset)
            tensor: IO[bytes] = io.BytesIO(file.read(sinfo.length))
        else:
            tensor = super()._slice_file(file, sinfo)
        require_shallow(tensor)
        return tensor


@dataclass
class _Files(FileSystem):
    """The files of a folder, by name, with length and CRC-32 of those that are written; the first OSError is kept."""

    folder: Folder
    readable: frozenset[str] = frozenset()
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: OSError | None = None

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        # DCP would rename `.metadata.tmp`; the folder is no checkpoint yet.
        name = os.fspath(path).removesuffix(".tmp")
        if mode == "rb":
            if name not in self.readable:
                raise pickle.UnpicklingError(f"{name!r:.200} is none of the checkpoint's files")
            with self.folder.open(name) as file:
                yield file
            return
        try:
            with self.folder.create(name) as file:
                stream = _Summing(file, self)
                yield stream
        except OSError as error:
            self.error = error
            raise
        self.files[name] = (stream.length, stream.crc)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Always False: the folder is new."""
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """It has its name."""


class _Summing:
    """A file that is written from beginning to end, and sums what it is given."""

    def __init__(self, file: IO[bytes], disk: _Files) -> None:
        self._file, self._disk = file, disk
        self.length = self.crc = 0

    def write(self, content: bytes | memoryview) -> int:
        self.crc = zlib.crc32(content, self.crc)
        try:
            written = self._file.write(content)
        except OSError as error:
            self._disk.error = error
            raise
        self.length += written
        return written

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        """The folder flushes it."""

    def close(self) -> None:
        """`_Files` closes it."""


def _writer(disk: _Files) -> FileSystemWriter:
    # No copying ahead: what it writes is in host memory already. The files are synced by the folder.
    writer = FileSystemWriter("unused", sync_files=False, per_thread_copy_ahead=0)
    writer.fs = disk
    # It is noted in `.metadata`.
    writer.path = str(disk.folder)
    writer.set_up_storage_writer(is_coordinator=True)
    return writer
