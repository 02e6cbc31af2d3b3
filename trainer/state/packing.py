"""Nested training state as one region of bytes: a header, a skeleton of plain values, and the tensors' bytes.

    0     8           4096                        4096 + skeleton_room           + data_length
    mark  header      skeleton (a pickle)         tensors, each at a multiple of 64

The mark is written last: a region without it is torn. The skeleton is a pickle in which a tensor is a reference (its
type, shape and offset); reading it runs no code. A reader checks everything: lengths, checksums, types.
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


# Errors that pickle raises for wrong bytes besides its own, and errors of torch for impossible shapes.
_NOT_OURS = (AttributeError, EOFError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError)


class NotPlain(TypeError):
    """A value that cannot be kept: it is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class Header:
    """The description of a whole region.

    `layout` is the digest of the state for which the region was made. `checksum` covers only the tensors' bytes: it is
    equal for all holders of the same state.
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
    """A disassembled state: `skeleton` refers to `tensors`, which belong at `offsets` in a region's data."""

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
        return _up(len(self.skeleton) + len(self.skeleton) // 8 + 256, PAGE)


def pack(state: object) -> Packed:
    """Disassemble `state`: dictionaries, lists and tuples of dense tensors and plain values. Raises NotPlain."""
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
    """Write skeleton, header and at last the mark around the tensors' bytes, which are in the region already."""
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
    """Erase the mark. Call this before anything else is changed."""
    _put(region, 0, bytes(len(MARK)))


def header_of(region: Tensor, *, marked: bool = True) -> Header | None:
    """The header, or None if the region is torn, too short or not in this format.

    With `marked` False the region may lack its mark, because it was copied without it.
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
    """Whether skeleton and tensors have not changed since `finish_region`."""
    start = PAGE + header.skeleton_room
    return (
        zlib.crc32(_get(region, PAGE, header.skeleton_length)) == header.skeleton_crc
        and checksum(region[start : start + header.data_length]) == header.checksum
    )


def unpack(region: Tensor, header: Header) -> Any:
    """The state, with tensors that are views of `region`. Raises UnpicklingError or ValueError if it is not valid."""
    start = PAGE + header.skeleton_room
    skeleton = io.BytesIO(_get(region, PAGE, header.skeleton_length))
    try:
        return _StateUnpickler(skeleton, region[start : start + header.data_length]).load()
    except _NOT_OURS as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise pickle.UnpicklingError(f"the skeleton cannot be read ({why})") from error


def checksum(data: Tensor) -> int:
    """A checksum of uint8 `data`, whose length is a multiple of 4096: CRC-32 over the sums of its pages.

    It runs at about the speed of memory. It detects every page that is stale, missing or in another place, and every
    changed word, but not two words of one page that changed places.
    """
    if not data.numel():
        return 0
    sums = data.view(torch.int64).view(-1, PAGE // 8).sum(1)
    content = bytearray(sums.numel() * 8)
    torch.frombuffer(content, dtype=torch.int64).copy_(sums)
    return zlib.crc32(content)


class _Pickler(pickle.Pickler):
    """Pickles everything except tensors, which it places one after the other."""

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
            return _Maker(_PLAIN[module, name])
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value") from None


class _Maker:
    """Stands for a type while a skeleton is read: it makes values, and nothing can be set on it or on the type."""

    __slots__ = ("_kind",)

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, *args: Any) -> Any:
        return self._kind(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a type has no state")


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
