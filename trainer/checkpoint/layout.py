"""The layout of a checkpoint's tensors (`tensors.json`), and the parts of a tensor that a rank has and needs.

DCP's own metadata file, `.metadata`, is a pickle: it is written for DCP's tools and never read here. `tensors.json` is
validated: each chunk lies in its tensor, and in a file of the checkpoint.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.strict_json import parse_json
from elaunch.trainer.checkpoint.storage import LAYOUT, Folder
from elaunch.trainer.state.pickles import require_shallow
from elaunch.trainer.state.tree import Path, is_shard, local_parts

Shape = tuple[int, ...]
# Offsets and sizes in the tensor; file, position and length.
Chunk = tuple[Shape, Shape, str, int, int]


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint, or, without chunks, of a snapshot. A checkpoint's `path` has strings only."""

    dtype: torch.dtype
    size: torch.Size
    path: Path
    chunks: Sequence[Chunk] = ()


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint in `folder`, by name."""

    folder: Folder
    tensors: dict[str, Saved]

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`, DTensors too, whatever world size wrote the checkpoint."""
        targets = Targets(tensors)
        reads = sorted(
            (file, at, length, name, offsets, sizes)
            for name in tensors
            for offsets, sizes, file, at, length in self.tensors[name].chunks
            if targets.need(name, offsets, sizes)
        )
        for file_name, its in itertools.groupby(reads, key=lambda read: read[0]):
            with self.folder.open(file_name) as file:
                for _, at, length, name, offsets, sizes in its:
                    file.seek(at)
                    targets.fill(name, offsets, _tensor(name, sizes, file.read(length)))


def contents(folder: Folder, layout: bytes, lengths: Mapping[str, int]) -> Contents:
    """Parse and validate `tensors.json`; `lengths`: of all files in the folder, by name.

    Raises ValueError if it is invalid.
    """
    found = {}
    try:
        for name, entry in parse_json(layout).items():
            dtype, size = getattr(torch, entry["dtype"]), torch.Size(entry["size"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"torch.{entry['dtype']:.80} is not a dtype")
            chunks = [(torch.Size(at), torch.Size(sizes), *place) for at, sizes, *place in entry["chunks"]]
            for offsets, sizes, file, at, length in chunks:
                _require_inside(name, offsets, sizes, size)
                is_place = type(at) is int and type(length) is int
                if not is_place or not 0 <= at <= at + length <= lengths.get(file, -1):
                    raise ValueError(f"{name} has a chunk outside of {file!r:.200}, or that file is not there")
            found[name] = Saved(dtype, size, tuple(map(str, entry["path"])), chunks)
    except (AttributeError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{LAYOUT} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
    return Contents(folder, found)


def _require_inside(name: str, offsets: Shape, sizes: Shape, whole: Shape) -> None:
    is_alike = len(offsets) == len(sizes) == len(whole)
    bounds = zip(offsets, sizes, whole, strict=False)
    if not is_alike or min(whole, default=0) < 0 or any(not 0 <= at <= at + many <= most for at, many, most in bounds):
        raise ValueError(f"{name} has a chunk that does not lie in its tensor of shape {tuple(whole)}")


def _tensor(name: str, sizes: Shape, content: bytes) -> Tensor:
    """Raises pickle.UnpicklingError if it is not a tensor of that shape."""
    file = io.BytesIO(content)
    require_shallow(file)
    found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, Tensor) or found.shape != sizes:
        raise pickle.UnpicklingError(f"{name} is not a tensor of shape {tuple(sizes)}")
    return found


class Targets:
    """Tensors to fill, by name; only this rank's part of a distributed one."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._boxes = {name: local_boxes(tensor) for name, tensor in tensors.items()}

    def need(self, name: str, offsets: Shape, sizes: Shape) -> bool:
        """Whether that box of a tensor overlaps a target."""
        return any(_overlap(at, part.shape, offsets, sizes) for part, at in self._boxes.get(name, ()))

    def fill(self, name: str, offsets: Shape, source: Tensor) -> None:
        """Copy what overlaps a target. `source` lies at these offsets of the tensor."""
        for part, at in self._boxes[name]:
            if found := _overlap(at, part.shape, offsets, source.shape):
                into, of = found
                part[into].copy_(source[of])


Slices = tuple[slice, ...]


def _overlap(at: Shape, sizes: Shape, other_at: Shape, other_sizes: Shape) -> tuple[Slices, Slices] | None:
    """The intersection of two boxes of a tensor as indices into each, None if empty."""
    bounds = zip(at, sizes, other_at, other_sizes, strict=True)
    spans = [(max(a, b), min(a + size, b + other)) for a, size, b, other in bounds]
    if any(begin >= end for begin, end in spans):
        return None
    mine, its = (
        tuple(slice(begin - first, end - first) for (begin, end), first in zip(spans, place, strict=True))
        for place in (at, other_at)
    )
    return mine, its


def local_boxes(tensor: Any) -> list[tuple[Tensor, Shape]]:
    """This rank's parts of a tensor, and the offsets of each. One that is not distributed is one part."""
    if not is_shard(tensor):
        places = [(0,) * tensor.ndim]
    elif hasattr(tensor, "placements"):
        places = [tuple(chunk.offsets) for chunk in tensor.__create_chunk_list__()]
    else:
        places = [tuple(shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    return list(zip((part.detach() for part in local_parts(tensor)), places, strict=True))
