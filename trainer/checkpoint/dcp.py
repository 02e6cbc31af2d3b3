"""The parts of `torch.distributed.checkpoint` (DCP) by which a checkpoint is written, without its collectives.

DCP's own `save` agrees between ranks by collectives in whatever thread it runs, which no other thread may disturb and
in which a survivor of a failure waits for minutes. Here its planner is called; who agrees with whom, and when, is the
caller's. The files are DCP's, readable with its tools. `layout` reads them.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

from elaunch.trainer.checkpoint.storage import LAYOUT, Folder
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import tree

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
