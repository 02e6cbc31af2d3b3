"""One checkpoint in the making: written, sealed and published by a thread while training continues.

Each rank sends rank 0 a summary of what it has written, over connections that only these threads use.
Rank 0 waits for all of them and then writes the rest. If a rank dies, rank 0 gets an error immediately, and the
checkpoint stays unpublished.

The files are those of `torch.distributed.checkpoint` (DCP), readable with its tools; `layout` reads them here. DCP's
own `save` coordinates the ranks by collectives in its thread, with which no other thread's may interleave, and in which
a survivor of a failure waits for minutes. Here its planner is called, and the ranks coordinate over their connections.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

from elaunch.trainer.checkpoint.storage import (
    LAYOUT,
    LAYOUT_BYTES_MAX,
    PLAIN,
    PLAIN_BYTES_MAX,
    Folder,
    Manifest,
    Mark,
    Storage,
    discard,
    keep_newest,
)
from elaunch.trainer.files import reason, require_size
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import tree

# What is to be written, in host memory.
Copies = dict[records.MetadataIndex, Tensor]
# For DCP's tools; elaunch does not read it.
_METADATA = ".metadata"


@dataclass(frozen=True)
class Plan:
    """Which tensors this rank writes; `metadata` (rank 0's, None elsewhere) has the locations of all."""

    items: SavePlan
    metadata: records.Metadata | None


def plan(tensors: Mapping[str, Tensor], paths: Mapping[str, tree.Path], ranks: Peers | None) -> Plan:
    """Divide the writing among these ranks. Collective. With None this process writes everything.

    If several ranks have the same data, one of them writes it.
    """
    planner = DefaultSavePlanner()
    leads = ranks is None or ranks.leads
    planner.set_up_planner(dict(tensors), is_coordinator=leads)
    # DCP's converters make a nested dictionary of the tensors with this.
    planner.mappings = {name: tuple(map(str, path)) for name, path in paths.items()}
    local = planner.create_local_plan()
    plans = [local] if ranks is None else ranks.gather(local)
    metadata = None
    shares: list[SavePlan] | None = None
    if plans is not None:
        shares, metadata = planner.create_global_plan(plans)
    if ranks is not None:
        shares = ranks.broadcast(shares)
    assert shares is not None
    return Plan(shares[0 if ranks is None else ranks.rank], metadata)


@dataclass(frozen=True)
class Part:
    """What one rank has written: where each piece of a tensor is, and length and CRC-32 of each file by name."""

    places: dict[records.MetadataIndex, _StorageInfo]
    files: dict[str, tuple[int, int]]


def staged(items: SavePlan, tensors: Mapping[str, Tensor], before: Copies) -> Copies:
    """Copies in host memory of what `items` lists, reusing the memory of `before` where it fits.

    On return the originals may change. GPU tensors are copied on the current stream.
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

    Raises OSError, even if torch has converted that of a full disk to another exception.
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
    """Write `.metadata` and `tensors.json`, the locations of all tensors; on rank 0, when all `parts` are there."""
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
    """A sequentially written file that computes its length and CRC-32. It keeps the first OSError."""

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
        """`create` flushes it."""


@dataclass
class Writing:
    """One checkpoint to write, in the unpublished `folder`, by `thread`. `plain` is the packed rest of the state.

    `ranks` write it together, and use these connections in no other thread. With None this rank writes all of it.
    `on_published` is called in the thread, on rank 0. `failure` is the reason for this rank's first error, empty
    without one.
    """

    mark: Mark
    storage: Storage
    folder: Folder
    plan: Plan
    copies: Copies
    plain: bytes
    ranks: Peers | None
    keep: int
    require_ours: Callable[[], None]
    on_published: Callable[[], None]
    failure: str = ""

    def __post_init__(self) -> None:
        # A daemon: a process that exits with an exception does not wait for the disk.
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def _run(self) -> None:
        is_published = False
        try:
            part = self._write_part()
            parts = [part] if self.ranks is None else self.ranks.gather(part)
            if parts is None:
                return
            # By now no rank writes to the folder.
            whole = [each for each in parts if each is not None]
            if len(whole) == len(parts):
                self._seal_and_publish(self.plan.metadata, whole)
                is_published = True
        # The edge of the thread; torch raises RuntimeError for many disk errors.
        except Exception as error:
            self.failure = self.failure or reason(error)
            if self.ranks is not None and not self.ranks.leads:
                return
        # Other ranks may still write: what they add is swept by the next start. Old checkpoints that stay cost space,
        # and deleting them is retried after the next checkpoint.
        with contextlib.suppress(OSError):
            if is_published:
                keep_newest(self.storage, self.keep, self.mark)
            else:
                discard(self.folder)
        if is_published:
            self.on_published()

    def _write_part(self) -> Part | None:
        try:
            return write(self.folder, 0 if self.ranks is None else self.ranks.rank, self.plan.items, self.copies)
        except Exception as error:
            self.failure = reason(error)
            return None

    def _seal_and_publish(self, metadata: records.Metadata | None, parts: list[Part]) -> None:
        assert metadata is not None
        files: dict[str, tuple[int, int]] = {PLAIN: (len(self.plain), zlib.crc32(self.plain))}
        self.folder.write(PLAIN, self.plain)
        for part in (*parts, finish(self.folder, metadata, parts)):
            files.update(part.files)
        # Nothing is published that readers would refuse for its size.
        require_size(LAYOUT, files[LAYOUT][0], LAYOUT_BYTES_MAX)
        require_size(PLAIN, files[PLAIN][0], PLAIN_BYTES_MAX)
        self.require_ours()
        self.storage.publish(self.folder, Manifest(self.mark, len(parts), files))
