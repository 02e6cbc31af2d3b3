"""The one format of state in shared memory: a header, a skeleton, and the tensors' bytes.

    0     8           4096                        4096 + skeleton_room           + data_length
    mark  header      skeleton (`packing`)        tensors, each at a multiple of 64

The mark is written last and erased first: a region without it is torn. It also names the format: a region of another
release counts as torn. The header has the rank and the step of the state, its own checksum, and those of the rest. A
reader verifies everything.
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elaunch.trainer.state import Piece as Piece
from elaunch.trainer.state import Version as Version

MARK = b"elaunch3"
PAGE = 4096
_FIELDS = struct.Struct("<16sqqIIQQQIQ")
# The version alone, which follows the 16 bytes of the layout.
_LAYOUT_BYTES, _VERSION = 16, struct.Struct("<qq")
_CRC_BYTES = 4


@dataclass(frozen=True)
class Header:
    """The description of a whole region.

    `layout` is the digest of the state for which the region was made. `checksum` covers only the tensors' bytes: it is
    equal for all holders of the same state.
    """

    layout: bytes
    piece: Piece
    skeleton_length: int
    skeleton_room: int
    data_length: int
    skeleton_crc: int
    checksum: int

    @property
    def version(self) -> Version:
        return self.piece.version

    @property
    def length(self) -> int:
        """Bytes of the whole region."""
        return PAGE + self.skeleton_room + self.data_length


@dataclass(frozen=True)
class Packed:
    """What goes into a region: `skeleton` refers to `tensors`, which belong at `offsets` in the region's data."""

    skeleton: bytes
    tensors: list[Tensor]
    offsets: list[int]
    data_length: int

    @property
    def length(self) -> int:
        """Bytes of the region that this state needs."""
        return PAGE + self.skeleton_room + self.data_length

    @property
    def skeleton_room(self) -> int:
        """Bytes reserved for the skeleton. It may grow (numbers in it do) without moving the tensors."""
        return up(len(self.skeleton) + len(self.skeleton) // 8 + 256, PAGE)


def views(region: Tensor, packed: Packed) -> list[Tensor]:
    """Views of the packed tensors' places in `region`."""
    data = region[PAGE + packed.skeleton_room :]
    return [
        view(data, tensor.dtype, tensor.shape, offset)
        for tensor, offset in zip(packed.tensors, packed.offsets, strict=True)
    ]


def finish(region: Tensor, layout: bytes, piece: Piece, packed: Packed) -> Header:
    """Write the skeleton, the header and at last the mark; the tensors' bytes are in the region already."""
    start = PAGE + packed.skeleton_room
    header = Header(
        layout=layout,
        piece=piece,
        skeleton_length=len(packed.skeleton),
        skeleton_room=packed.skeleton_room,
        data_length=packed.data_length,
        skeleton_crc=zlib.crc32(packed.skeleton),
        checksum=checksum(region[start : start + packed.data_length]),
    )
    put(region, PAGE, packed.skeleton)
    fields = _fields(header)
    put(region, len(MARK), fields + _crc(fields))
    mark(region)
    return header


class Label:
    """The header of a whole region, which `write` replaces by that of another version with the same content."""

    def __init__(self, header: Header, region: Tensor) -> None:
        fields = _fields(header)
        self._layout, self._rest = fields[:_LAYOUT_BYTES], fields[_LAYOUT_BYTES + _VERSION.size :]
        # A reference, so that the memory stays mapped.
        self._region = region
        self._memory = (ctypes.c_char * (len(MARK) + len(fields) + _CRC_BYTES)).from_address(region.data_ptr())

    def write(self, version: Version) -> None:
        """Declare the content that of `version`. Each step does this, so it makes few calls."""
        fields = self._layout + _VERSION.pack(*version) + self._rest
        self._memory.raw = MARK + fields + _crc(fields)


def _fields(header: Header) -> bytes:
    lengths = header.skeleton_length, header.skeleton_room, header.data_length
    whose = *header.piece.version, header.piece.world_size, header.piece.rank
    return _FIELDS.pack(header.layout, *whose, *lengths, header.skeleton_crc, header.checksum)


def _crc(fields: bytes) -> bytes:
    return zlib.crc32(fields).to_bytes(_CRC_BYTES, "little")


def mark(region: Tensor) -> None:
    """Mark the region as whole."""
    put(region, 0, MARK)


def tear(region: Tensor) -> None:
    """Erase the mark. Call this before anything else is changed."""
    put(region, 0, bytes(len(MARK)))


def header_of(region: Tensor, *, marked: bool = True) -> Header | None:
    """The header, or None if the region is torn, too short or not in this format.

    With `marked` False the region may lack its mark, because it was copied without it.
    """
    if region.numel() < PAGE:
        return None
    content = get(region, 0, len(MARK) + _FIELDS.size + _CRC_BYTES)
    fields, crc = content[len(MARK) : -_CRC_BYTES], content[-_CRC_BYTES:]
    if (marked and content[: len(MARK)] != MARK) or _crc(fields) != crc:
        return None
    layout, generation, step, world_size, rank, *numbers = _FIELDS.unpack(fields)
    header = Header(layout, Piece(Version(generation, step), world_size, rank), *numbers)
    return header if header.length <= region.numel() and header.skeleton_length <= header.skeleton_room else None


def is_intact(region: Tensor, header: Header) -> bool:
    """Whether skeleton and tensors have not changed since `finish`."""
    return zlib.crc32(skeleton_of(region, header)) == header.skeleton_crc and (
        checksum(data_of(region, header)) == header.checksum
    )


def skeleton_of(region: Tensor, header: Header) -> bytes:
    """The skeleton's bytes."""
    return get(region, PAGE, header.skeleton_length)


def data_of(region: Tensor, header: Header) -> Tensor:
    """The tensors' bytes, as a view."""
    start = PAGE + header.skeleton_room
    return region[start : start + header.data_length]


def checksum(data: Tensor) -> int:
    """A checksum of uint8 `data`, whose length is a multiple of 4096: CRC-32 over the sums of its pages.

    It runs at about the speed of memory. It detects every page that is stale, missing or in another place, and every
    changed integer of 8 bytes, but not two of them that were swapped in one page.
    """
    if not data.numel():
        return 0
    sums = data.view(torch.int64).view(-1, PAGE // 8).sum(1)
    content = bytearray(sums.numel() * 8)
    torch.frombuffer(content, dtype=torch.int64).copy_(sums)
    return zlib.crc32(content)


def view(data: Tensor, dtype: torch.dtype, shape: Sequence[int], begin: int) -> Tensor:
    """A tensor whose bytes are in `data` from `begin` on. Raises ValueError for one that is not there."""
    if any(type(size) is not int or size < 0 for size in shape) or type(begin) is not int:
        raise ValueError(f"{shape!r:.80} is no shape")
    length = math.prod(shape) * dtype.itemsize
    if begin < 0 or begin + length > data.numel():
        raise ValueError(f"a tensor at {begin} + {length} lies outside of {data.numel()} bytes")
    return data[begin : begin + length].view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> Tensor | None:
    """The bytes of a tensor, as a view; None if they are not in the order of its indices."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().view(-1).view(torch.uint8)


def up(number: int, of: int) -> int:
    """`number` rounded up to a multiple of `of`."""
    return -(-number // of) * of


def put(region: Tensor, offset: int, content: bytes) -> None:
    """Write bytes into a region in host memory. Not by torch, since it runs several times per step."""
    ctypes.memmove(_address(region, offset, len(content)), content, len(content))


def get(region: Tensor, offset: int, length: int) -> bytes:
    """Bytes of a region in host memory."""
    return ctypes.string_at(_address(region, offset, length), length) if length else b""


def _address(region: Tensor, offset: int, length: int) -> int:
    if offset < 0 or length < 0 or offset + length > region.numel():
        raise ValueError(f"bytes {offset} to {offset + length} lie outside of {region.numel()} bytes")
    return region.data_ptr() + offset
