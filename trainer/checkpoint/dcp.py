"""The parts of `torch.distributed.checkpoint` (DCP) that a checkpoint consists of, without its collectives.

DCP's own `save` and `load` agree between ranks by collectives in whatever thread they run, which no other thread may
disturb and in which a survivor of a failure waits for minutes. Here its planners, its writer and its reader are called
one by one; who agrees with whom, and when, is the caller's. The files are DCP's, readable with its tools.

DCP trusts what it reads: `.metadata` is a pickle. Here it is one that can make DCP's records and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from elaunch.trainer.checkpoint.storage import Folder
from elaunch.trainer.state import tree

_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (*records.__all__, "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.storage", "WriteResult"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


@dataclass(frozen=True)
class Plan:
    """Which tensors this rank writes; `metadata` (rank 0's, None elsewhere) says where all of them are."""

    items: SavePlan
    metadata: records.Metadata | None


@dataclass(frozen=True)
class Part:
    """What one rank has written: DCP's account of it, and length and CRC-32 of each file by name."""

    results: list[WriteResult]
    files: dict[str, tuple[int, int]]


def plan(tensors: Mapping[str, Tensor], paths: Mapping[str, tree.Path], group: dist.ProcessGroup | None) -> Plan:
    """Share the writing among the ranks of `group`, which all call this. With None this process writes everything.

    If several ranks have the same data, one of them writes it.
    """
    planner = DefaultSavePlanner()
    leads = group is None or dist.get_rank(group) == 0
    planner.set_up_planner(dict(tensors), is_coordinator=leads)
    # DCP's converters make a nested dictionary of the tensors with this.
    planner.mappings = {name: tuple(map(str, path)) for name, path in paths.items()}
    local = planner.create_local_plan()
    plans = [local]
    if group is not None:
        gathered: list[Any] | None = [None] * dist.get_world_size(group) if leads else None
        dist.gather_object(local, gathered, group=group, dst=dist.get_global_rank(group, 0))
        plans = gathered or []
    metadata = None
    shares: list[Any] | None = None
    if leads:
        shares, metadata = planner.create_global_plan(plans)
        shares = FileSystemWriter("unused").prepare_global_plan(shares)
    if group is None:
        return Plan(cast(list[SavePlan], shares)[0], metadata)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, shares, group=group, src=dist.get_global_rank(group, 0))
    return Plan(mine[0], metadata)


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
    """Write `.metadata`, which says where everything is; on rank 0, when all `parts` are there."""
    disk = _Files(folder)
    _writer(disk).finish(metadata, [part.results for part in parts])
    # It is written under another name first.
    return Part([], {name.removesuffix(".tmp"): seal for name, seal in disk.files.items()})


def read(folder: Folder, targets: Mapping[str, Tensor]) -> None:
    """Fill `targets`, DTensors too, from the checkpoint in `folder`, however many ranks have written it."""
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=True)
    planner.set_up_planner(dict(targets), metadata)
    items = planner.finish_plan(planner.create_local_plan())
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(items, planner).wait()


def read_kinds(folder: Folder) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Size and type of each tensor in the checkpoint by its name."""
    found = {}
    for name, entry in _Reader(folder).read_metadata().state_dict_metadata.items():
        if isinstance(entry, records.TensorStorageMetadata):
            found[name] = (entry.size, entry.properties.dtype)
    return found


def read_paths(folder: Folder) -> dict[str, tree.Path]:
    """The path of each tensor in the checkpoint by its name, all keys as strings."""
    paths: dict[str, tree.Path] = _Reader(folder).read_metadata().planner_data
    return paths


def local_chunks(tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, WriteItem]]:
    """The parts of `tensors` that this rank holds, each with DCP's description of it (offsets and sizes)."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors))
    items = create_default_local_save_plan(planner.state_dict, False).items
    return [(planner.lookup_object(item.index).detach(), item) for item in items]


def fill(target: Tensor, name: str, whole: Tensor) -> None:
    """Copy `whole` into `target`, or of a DTensor the part that is here."""
    if not tree.is_shard(target):
        target.detach().copy_(whole)
        return
    for part, item in local_chunks({name: target}):
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        source = whole
        for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            source = source.narrow(dimension, offset, size)
        part.copy_(source)


def loads(content: bytes) -> Any:
    """Read a pickle of DCP's records; raises pickle.UnpicklingError at the first thing that is something else."""
    return _Unpickler(io.BytesIO(content)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == (Part.__module__, Part.__name__):
            return Part
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint")


def _member(kind: object, name: str) -> Enum:
    """By which Python 3.11.0 to 3.11.3 pickle an enum's member, with `getattr` itself; of nothing else is it read."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it names {name!r} of {kind!r}, which is no member of an enum")


class _Reader(FileSystemReader):
    def __init__(self, folder: Folder) -> None:
        super().__init__("unused")
        self._folder = folder
        self.fs = _Files(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> records.Metadata:
        metadata: records.Metadata = loads(self._folder.read(".metadata"))
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._folder.is_remote:
            # From the beginning of each file to its end: what is read ahead is what comes next.
            places = self.storage_data
            items = sorted(
                plan.items,
                key=lambda item: (places[item.storage_index].relative_path, places[item.storage_index].offset),
            )
            plan = replace(plan, items=items)
        return super().read_data(plan, planner)

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        if not self._folder.is_remote:
            return super()._slice_file(file, sinfo)
        # torch reads a tensor's end first, then its beginning: once over the network is enough.
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))


@dataclass
class _Files(FileSystem):
    """The files of a folder, by name, with length and CRC-32 of those that are written; the first OSError is kept."""

    folder: Folder
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: OSError | None = None

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        name = os.fspath(path)
        if mode == "rb":
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
        self.folder.rename(os.fspath(path), os.fspath(new_path))


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
        try:
            self._file.flush()
        except OSError as error:
            self._disk.error = error
            raise

    def fileno(self) -> int:
        return self._file.fileno()

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
