"""A rank's part of a sharded state as a file in shared memory, which outlives the process.

    0     8        128      128 + layout        …                      a multiple of 64
    mark  numbers  layout   plain values        (room for longer ones)  tensors, each at a multiple of 64

The mark is written last and erased first: a file without it is torn. The mark also names the format, so that a file of
another release is refused. The numbers have their own CRC, and contain the checksums of the rest. The layout, in JSON,
says which part of which tensor is where; it is made once, so that a snapshot is one copy per tensor. A reader checks
everything.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.checkpoint import dcp
from elaunch.trainer.files import parse_json
from elaunch.trainer.memory.shard_choice import Piece
from elaunch.trainer.state import tree

MARK = b"elaunch2"
# In this format the numbers had no CRC.
_MARK_BEFORE = b"elaunch1"
_NUMBERS = struct.Struct("<qqIIQQQQQQ")
_CRC = struct.Struct("<I")
_HEAD_BYTES = 128
_ALIGNMENT = 64


class Torn(ValueError):
    """The file is no whole piece; the message says why."""


@dataclass(frozen=True)
class Chunk:
    """A part of the tensor `name` of shape `size`: the box at `offsets` with `sizes`. Its bytes begin at `begin`."""

    name: str
    path: tree.Path
    dtype: torch.dtype
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    def view(self, data: Tensor) -> Tensor:
        """This part as a view of `data`, the bytes of a piece's tensors."""
        return data[self.begin : self.end].view(self.dtype).view(self.sizes)

    @property
    def end(self) -> int:
        """The end of its bytes."""
        return self.begin + math.prod(self.sizes) * self.dtype.itemsize


def _chunk(name: str, path: list[str | int], dtype: str, size: Any, offsets: Any, sizes: Any, begin: Any) -> Chunk:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or not isinstance(name, str) or not len(size) == len(offsets) == len(sizes):
        raise TypeError(f"{name!r:.80} is no part of a tensor")
    size, offsets, sizes = (tuple(_count(each) for each in numbers) for numbers in (size, offsets, sizes))
    return Chunk(name, tuple(path), kind, size, offsets, sizes, _count(begin))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is no number of bytes or elements")
    return value


@dataclass(frozen=True)
class Layout:
    """The places of all parts, and the number of bytes of all tensors."""

    chunks: tuple[Chunk, ...]
    length: int

    def dumps(self) -> bytes:
        rows = [
            [c.name, list(c.path), str(c.dtype).removeprefix("torch."), c.size, c.offsets, c.sizes, c.begin]
            for c in self.chunks
        ]
        return json.dumps({"length": self.length, "chunks": rows}).encode()

    @classmethod
    def loads(cls, content: bytes) -> Layout:
        """The layout that `dumps` wrote. Raises Torn for other content."""
        try:
            record = parse_json(content)
            layout = cls(tuple(_chunk(*row) for row in record["chunks"]), _count(record["length"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Torn(f"its layout cannot be read ({str(error)[:200]})") from error
        if any(chunk.end > layout.length for chunk in layout.chunks):
            raise Torn("its layout names bytes that it does not have")
        return layout


def lay_out(parts: tree.Tree) -> tuple[Layout, list[Tensor]]:
    """A layout for this rank's part of the state, and its live tensors in the layout's order."""
    chunks, tensors, begin = [], [], 0
    for local, item in dcp.local_chunks(parts.tensors):
        assert item.tensor_data is not None
        box, name = item.tensor_data.chunk, item.index.fqn
        if not local.numel():
            continue
        size = tuple(item.tensor_data.size)
        chunks.append(Chunk(name, parts.paths[name], local.dtype, size, tuple(box.offsets), tuple(box.sizes), begin))
        tensors.append(local)
        begin = _aligned(begin + local.numel() * local.element_size())
    return Layout(tuple(chunks), begin), tensors


def live(parts: tree.Tree) -> list[Tensor]:
    """The tensors of `lay_out` for a state of the same signature, hundreds of times faster."""
    return [local for tensor in parts.tensors.values() for local in tree.local_parts(tensor) if local.numel()]


@dataclass(frozen=True)
class _Numbers:
    generation: int
    step: int
    world_size: int
    rank: int
    layout_length: int
    plain_length: int
    data_begin: int
    data_length: int
    head_crc: int
    data_sum: int

    def pack(self) -> bytes:
        content = _NUMBERS.pack(*vars(self).values())
        return content + _CRC.pack(zlib.crc32(content))

    @classmethod
    def unpack(cls, content: bytes) -> _Numbers:
        """Raises Torn if these are not the numbers that were packed."""
        if zlib.crc32(content[: _NUMBERS.size]) != _CRC.unpack_from(content, _NUMBERS.size)[0]:
            raise Torn("the checksum of its numbers is wrong")
        return cls(*_NUMBERS.unpack_from(content))

    @property
    def piece(self) -> Piece:
        return Piece(self.generation, self.step, self.world_size, self.rank)

    @property
    def head_end(self) -> int:
        return _HEAD_BYTES + self.layout_length + self.plain_length


class PieceFile:
    """A piece that is being written: room for `layout` at `path`, allocated at once. Raises OSError without room.

    Its memory is shared with every process that maps the file. It is freed when the file is unlinked and closed by all.
    """

    def __init__(self, path: Path, layout: Layout, plain_length: int) -> None:
        self.path, self._layout = path, layout
        self._head = layout.dumps()
        self._room = 2 * plain_length + 4096
        self._data_begin = _aligned(_HEAD_BYTES + len(self._head) + self._room)
        self._bytes = _mapped(path, self._data_begin + layout.length)
        self._data = self._bytes[self._data_begin :]
        self._views = [chunk.view(self._data) for chunk in layout.chunks]

    @property
    def length(self) -> int:
        return self._bytes.numel()

    def has_room(self, plain: bytes) -> bool:
        return len(plain) <= self._room

    def erase(self) -> None:
        """Declare the piece torn."""
        self._bytes[:_HEAD_BYTES] = 0

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors, in the layout's order. They may change after this returns."""
        with torch.no_grad():
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def complete(self, piece: Piece, plain: bytes) -> None:
        """Write everything around the copied tensors, except the mark."""
        head = self._head + plain
        numbers = _Numbers(
            generation=piece.generation,
            step=piece.step,
            world_size=piece.world_size,
            rank=piece.rank,
            layout_length=len(self._head),
            plain_length=len(plain),
            data_begin=self._data_begin,
            data_length=self._layout.length,
            head_crc=zlib.crc32(head),
            data_sum=sum_of(self._data),
        )
        _put(self._bytes, _HEAD_BYTES, head)
        _put(self._bytes, len(MARK), numbers.pack())

    def mark(self) -> None:
        """Declare the piece whole."""
        _put(self._bytes, 0, MARK)

    def body(self) -> Tensor:
        """All bytes after the mark, in the form in which they are sent."""
        return self._bytes[len(MARK) :]


class Received:
    """A piece that is received from another node into `body`. Raises OSError if there is no room."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self._bytes = _mapped(path, length)

    def erase(self) -> None:
        self._bytes[:_HEAD_BYTES] = 0

    def body(self) -> Tensor:
        return self._bytes[len(MARK) :]

    def accept(self, piece: Piece) -> None:
        """Mark the file as whole. Raises Torn if another piece has arrived, or only a part of it."""
        numbers = _numbers(self._bytes)
        _check(self._bytes, numbers)
        if numbers.piece != piece:
            raise Torn(f"it is {numbers.piece}, not {piece}")
        _put(self._bytes, 0, MARK)


class StoredPiece:
    """A whole piece in a file. `checked` says that its checksums have been verified before.

    `data_sum` is `sum_of` the tensors' bytes. Raises OSError, and Torn if the piece is not whole.
    """

    def __init__(self, path: Path, checked: bool = False) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _HEAD_BYTES:
                raise Torn("it is cut off")
            # Copy on write: torch needs writable memory.
            shared = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        raw = torch.frombuffer(shared, dtype=torch.uint8)
        mark = bytes(shared[: len(MARK)])
        if mark == _MARK_BEFORE:
            raise Torn("it is in the format of an older release")
        if mark != MARK:
            raise Torn("it was not finished")
        numbers = _numbers(raw)
        if not checked:
            _check(raw, numbers)
        head = bytes(shared[_HEAD_BYTES : numbers.head_end])
        self.data = raw[numbers.data_begin :]
        self.data_sum = numbers.data_sum
        self.piece = numbers.piece
        self.layout_json = head[: numbers.layout_length]
        self.plain = head[numbers.layout_length :]


def sum_of(data: Tensor) -> int:
    """The sum of 64-bit words, modulo 2^64: ten times as fast as a CRC-32, and different for every torn copy."""
    return int(data.view(torch.int64).sum().item()) % (1 << 64) if data.numel() else 0


def _numbers(raw: Tensor) -> _Numbers:
    """The numbers in a file. Raises Torn if they contradict each other."""
    numbers = _Numbers.unpack(_get(raw, len(MARK), _HEAD_BYTES))
    if numbers.head_end > numbers.data_begin or numbers.data_begin + numbers.data_length != raw.numel():
        raise Torn("its lengths do not add up")
    return numbers


def _check(raw: Tensor, numbers: _Numbers) -> None:
    """Read the whole file; raises Torn if it is not what was written."""
    head_crc = zlib.crc32(_get(raw, _HEAD_BYTES, numbers.head_end))
    if head_crc != numbers.head_crc or sum_of(raw[numbers.data_begin :]) != numbers.data_sum:
        raise Torn("its checksum is wrong")


def _mapped(path: Path, length: int) -> Tensor:
    """A new file of `length` allocated bytes, so that no later write ends in SIGBUS. Raises OSError."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, length)
        return torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def _put(target: Tensor, begin: int, content: bytes) -> None:
    if content:
        target[begin : begin + len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _get(source: Tensor, begin: int, end: int) -> bytes:
    content = bytearray(end - begin)
    if content:
        torch.frombuffer(content, dtype=torch.uint8).copy_(source[begin:end])
    return bytes(content)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
