"""The parts of `torch.distributed.checkpoint` (DCP) that a checkpoint consists of, without its collectives.

DCP's own `save` and `load` agree between ranks by collectives in whatever thread they run, which no other thread may
disturb and in which a survivor of a failure waits for minutes. Here its planners are called one by one; who agrees with
whom, and when, is the caller's. The files are DCP's, readable with its tools.

DCP trusts what it reads: `.metadata` is a pickle, written for DCP's tools and never read here. What it says is in
`tensors.json` too, and of that DCP's records are made: each chunk lies in its tensor, and in a file of the checkpoint.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from elaunch.strict_json import parse_json
from elaunch.trainer.checkpoint.storage import LAYOUT, Folder
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import tree
from elaunch.trainer.state.pickles import require_shallow

Metadata = records.Metadata
# What is to be written, in host memory.
Copies = dict[records.MetadataIndex, Tensor]
# What DCP's tools read, and no trainer.
_METADATA = ".metadata"


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
    if ranks is not None:
        shares = ranks.from_rank_0(shares)
    assert shares is not None
    return Plan(shares[0 if ranks is None else ranks.rank], metadata)


@dataclass(frozen=True)
class Part:
    """What one rank has written: where each piece of a tensor is, and length and CRC-32 of each file by name."""

    places: dict[records.MetadataIndex, _StorageInfo]
    files: dict[str, tuple[int, int]]


def staged(items: SavePlan, tensors: Mapping[str, Tensor], before: Copies) -> Copies:
    """Copies in host memory of what `items` lists, in the memory of those `before` where they fit.

    On return the originals may change. Tensors of a GPU are copied by its queue.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors))
    copies, devices = Copies(), set()
    for item in items.items:
        original = planner.lookup_object(item.index).detach()
        copy = before.get(item.index)
        if copy is None or copy.shape != original.shape or copy.dtype != original.dtype:
            copy = torch.empty(original.shape, dtype=original.dtype, pin_memory=original.is_cuda)
        copies[item.index] = copy.copy_(original, non_blocking=original.is_cuda)
        if original.is_cuda:
            devices.add(original.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def write(folder: Folder, rank: int, items: SavePlan, copies: Copies) -> Part:
    """Write this rank's tensors durably to a file in `folder`.

    Raises OSError, also where torch has made something else of the one that a full disk raises.
    """
    if not items.items:
        return Part({}, {})
    name, places = f"__{rank}_0.distcp", {}
    with folder.create(name) as file:
        summing = _Summing(file)
        try:
            for item in items.items:
                begin = summing.length
                torch.save(copies[item.index], cast(IO[bytes], summing))
                places[item.index] = _StorageInfo(name, begin, summing.length - begin)
        except Exception:
            if summing.error is not None:
                raise summing.error from None
            raise
    return Part(places, {name: (summing.length, summing.crc)})


def finish(folder: Folder, metadata: records.Metadata, parts: Sequence[Part]) -> Part:
    """Write `.metadata` and `tensors.json`, which say where everything is; on rank 0, when all `parts` are there."""
    metadata.storage_data = {index: place for part in parts for index, place in part.places.items()}
    contents = {_METADATA: pickle.dumps(metadata), LAYOUT: _described(metadata)}
    for name, content in contents.items():
        folder.write(name, content)
    return Part({}, {name: (len(content), zlib.crc32(content)) for name, content in contents.items()})


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
    """What `tensors.json` says of a checkpoint in `folder`: its tensors, and where they lie in its files."""

    folder: Folder
    metadata: records.Metadata

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
        planner, items = load_plan(targets, self.metadata)
        by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
        for item in items:
            place = self.metadata.storage_data[item.storage_index]
            by_file.setdefault(place.relative_path, []).append((place, item))
        for name, reads in by_file.items():
            with self.folder.open(name) as file:
                for place, item in sorted(reads, key=lambda read: read[0].offset):
                    file.seek(place.offset)
                    fill(planner, item, _tensor(item.storage_index.fqn, file.read(place.length)))


def load_plan(targets: Mapping[str, Tensor], metadata: records.Metadata) -> tuple[DefaultLoadPlanner, list[ReadItem]]:
    """What is to be read for `targets`, which the planner knows."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=True)
    planner.set_up_planner(dict(targets), metadata)
    return planner, planner.finish_plan(planner.create_local_plan()).items


def fill(planner: DefaultLoadPlanner, item: ReadItem, source: Tensor) -> None:
    """Fill the part of a target that `item` names. `source` is what was saved of it in one place."""
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dimension, offset, length)
    planner.resolve_tensor(item).detach().copy_(source)


def _tensor(name: str, content: bytes) -> Tensor:
    """Raises pickle.UnpicklingError for what is none."""
    file = io.BytesIO(content)
    require_shallow(file)
    found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, Tensor):
        raise pickle.UnpicklingError(f"{name} is no tensor")
    return found


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
    return Contents(folder, found)


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


class _Summing:
    """A file that is written from beginning to end, and sums what it is given. The first OSError is kept."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.length = self.crc = 0
        self.error: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        self.crc = zlib.crc32(content, self.crc)
        try:
            written = self._file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise
        self.length += written
        return written

    def flush(self) -> None:
        """The folder flushes it."""
