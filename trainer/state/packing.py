"""Nested training state as one region of bytes: a header, a skeleton of plain values, and the tensors' bytes.

    0     8           4096                        4096 + skeleton_room           + data_length
    mark  header      skeleton (a pickle)         tensors, each at a multiple of 64

The mark is written last: a region without it is torn. The skeleton is a pickle in which a tensor is a reference (its
type, shape and offset), and is read without running code. Whoever reads trusts nothing: lengths, checksums, types.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.state.version import Version

MARK = b"elaunch1"
PAGE = 4096
_ALIGNMENT = 64
_FIELDS = struct.Struct("<16sqqQQQIQ")
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("builtins", "complex"): complex,
    ("torch", "Size"): torch.Size,
}


# Errors of pickle, besides its own, for wrong bytes, and errors of torch for impossible shapes.
_NOT_OURS = (AttributeError, EOFError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError)


class NotPlain(TypeError):
    """A value that cannot be kept: it is neither a tensor nor made of plain values."""


@dataclass(frozen=True)
class Header:
    """What a whole region says of itself.

    `layout` is the digest of the state that it was made for, `checksum` is over the tensors' bytes alone: holders of
    the same state have the same.
    """

    layout: bytes
    version: Version
    skeleton_length: int
    skeleton_room: int
    data_length: int
    skeleton_crc: int
    checksum: int

    @property
    def length(self) -> int:
        """Bytes of the whole region."""
        return PAGE + self.skeleton_room + self.data_length


@dataclass(frozen=True)
class Packed:
    """A state taken apart: `skeleton` refers to `tensors`, which are to lie at `offsets` of a region's data."""

    skeleton: bytes
    tensors: list[Tensor]
    offsets: list[int]
    data_length: int

    @property
    def length(self) -> int:
        """Bytes of the region that it needs."""
        return PAGE + self.skeleton_room + self.data_length

    @property
    def skeleton_room(self) -> int:
        """More than it takes now: numbers in it grow, and the tensors should stay where they are."""
        return _up(len(self.skeleton) + len(self.skeleton) // 8 + 256, PAGE)


def pack(state: object) -> Packed:
    """Take `state` apart: dictionaries, lists and tuples of dense tensors and plain values; raises NotPlain."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(state)
    return Packed(content.getvalue(), pickler.tensors, pickler.offsets, _up(pickler.end, PAGE))


def views(region: Tensor, packed: Packed) -> list[Tensor]:
    """The places of the packed tensors in `region`."""
    data = region[PAGE + packed.skeleton_room :]
    return [
        _view(data, tensor.dtype, tensor.shape, offset)
        for tensor, offset in zip(packed.tensors, packed.offsets, strict=True)
    ]


def finish_region(region: Tensor, layout: bytes, version: Version, packed: Packed) -> Header:
    """Write skeleton and header around the tensors' bytes, which are there already, and at last the mark."""
    start = PAGE + packed.skeleton_room
    header = Header(
        layout=layout,
        version=version,
        skeleton_length=len(packed.skeleton),
        skeleton_room=packed.skeleton_room,
        data_length=packed.data_length,
        skeleton_crc=zlib.crc32(packed.skeleton),
        checksum=checksum(region[start : start + packed.data_length]),
    )
    _put(region, PAGE, packed.skeleton)
    fields = _FIELDS.pack(
        layout,
        version.generation,
        version.step,
        header.skeleton_length,
        header.skeleton_room,
        header.data_length,
        header.skeleton_crc,
        header.checksum,
    )
    _put(region, len(MARK), fields + zlib.crc32(fields).to_bytes(4, "little"))
    mark(region)
    return header


def mark(region: Tensor) -> None:
    """Declare the region whole."""
    _put(region, 0, MARK)


def tear(region: Tensor) -> None:
    """Take the mark away, before anything else is changed."""
    _put(region, 0, bytes(len(MARK)))


def header_of(region: Tensor, *, marked: bool = True) -> Header | None:
    """The header, or None where the region is torn, too short or nothing of ours.

    `marked` False asks for the header of a region that was copied without its mark.
    """
    if region.numel() < PAGE:
        return None
    content = _get(region, 0, len(MARK) + _FIELDS.size + 4)
    fields, crc = content[len(MARK) : -4], content[-4:]
    if (marked and content[: len(MARK)] != MARK) or zlib.crc32(fields).to_bytes(4, "little") != crc:
        return None
    layout, generation, step, *numbers = _FIELDS.unpack(fields)
    header = Header(layout, Version(generation, step), *numbers)
    return header if header.length <= region.numel() and header.skeleton_length <= header.skeleton_room else None


def is_intact(region: Tensor, header: Header) -> bool:
    """Whether skeleton and tensors are what they were when the region was sealed."""
    start = PAGE + header.skeleton_room
    return (
        zlib.crc32(_get(region, PAGE, header.skeleton_length)) == header.skeleton_crc
        and checksum(region[start : start + header.data_length]) == header.checksum
    )


def unpack(region: Tensor, header: Header) -> Any:
    """The state, its tensors views of `region`; raises UnpicklingError or ValueError where it is not ours."""
    start = PAGE + header.skeleton_room
    skeleton = io.BytesIO(_get(region, PAGE, header.skeleton_length))
    try:
        return _StateUnpickler(skeleton, region[start : start + header.data_length]).load()
    except _NOT_OURS as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise pickle.UnpicklingError(f"the skeleton cannot be read ({why})") from error


def checksum(data: Tensor) -> int:
    """A checksum of uint8 `data`, whose length is a multiple of 4096: CRC-32 over the sums of its pages.

    About as fast as memory is read. It sees any page that is stale, missing or in another place, and any changed word;
    two words that changed places within a page it does not see.
    """
    if not data.numel():
        return 0
    sums = data.view(torch.int64).view(-1, PAGE // 8).sum(1)
    content = bytearray(sums.numel() * 8)
    torch.frombuffer(content, dtype=torch.int64).copy_(sums)
    return zlib.crc32(content)


class _Pickler(pickle.Pickler):
    """Pickles all but tensors, for which it finds places one after the other."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self.offsets: list[int] = []
        self.end = 0
        self._known: dict[tuple[object, ...], int] = {}

    def persistent_id(self, value: Any) -> tuple[str, tuple[int, ...], int] | None:
        if not isinstance(value, Tensor):
            return None
        if value.layout != torch.strided or value.is_quantized or hasattr(value, "__tensor_flatten__"):
            raise NotPlain(
                f"a tensor of {type(value).__name__} with layout {value.layout} cannot be kept; use dense ones"
            )
        shape = tuple(value.shape)
        # Tied weights are one tensor under two names.
        key = (value.device, value.data_ptr(), value.dtype, shape, value.stride())
        offset = self._known.get(key)
        if offset is None:
            offset = self._known[key] = self.end
            self.tensors.append(value.detach())
            self.offsets.append(offset)
            self.end = _up(offset + value.numel() * value.element_size(), _ALIGNMENT)
        return str(value.dtype).removeprefix("torch."), shape, offset

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and (value.__module__, value.__qualname__) in _PLAIN:
            return NotImplemented
        if (type(value).__module__, type(value).__qualname__) in _PLAIN:
            return NotImplemented
        raise NotPlain(
            f"{value!r:.80} of type {type(value).__module__}.{type(value).__qualname__} cannot be kept; "
            "put tensors and plain values (numbers, strings, lists, dictionaries) into the state"
        )


class _StateUnpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote: plain values, and views of `data`."""

    def __init__(self, file: io.BytesIO, data: Tensor) -> None:
        super().__init__(file)
        self._data = data

    def persistent_load(self, reference: Any) -> Tensor:
        name, shape, offset = reference
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"no type of tensors: {name!r}")
        return _view(self._data, dtype, shape, offset)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PLAIN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value") from None


def _view(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    if any(type(size) is not int or size < 0 for size in shape) or type(offset) is not int:
        raise ValueError(f"{shape!r:.80} is no shape")
    length = math.prod(shape) * dtype.itemsize
    if offset < 0 or offset + length > data.numel():
        raise ValueError(f"a tensor at {offset} + {length} lies outside of {data.numel()} bytes")
    return data[offset : offset + length].view(dtype).view(shape)


def _put(region: Tensor, offset: int, content: bytes) -> None:
    region[offset : offset + len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _get(region: Tensor, offset: int, length: int) -> bytes:
    content = bytearray(length)
    if length:
        torch.frombuffer(content, dtype=torch.uint8).copy_(region[offset : offset + length])
    return bytes(content)


def _up(number: int, of: int) -> int:
    return -(-number // of) * of
