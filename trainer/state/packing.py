"""Nested training state as a skeleton of plain values and boxes of tensors, for a region of memory or a checkpoint.

The skeleton is a pickle in which a tensor is a reference: its type, its shape, and for each box that this rank has, its
offsets in the tensor and where its bytes are. A tensor that is not distributed is one box, which covers everything.
Reading a skeleton runs no code.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from elaunch.trainer.state.pickles import require_shallow_value, scan
from elaunch.trainer.state.region import PAGE, Header, Packed, data_of, skeleton_of, up, view
from elaunch.trainer.state.tree import Path, PerRank, Tree, is_numpy_scalar, numpy_scalar

_ALIGNMENT = 64
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("builtins", "complex"): complex,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    (PerRank.__module__, PerRank.__qualname__): PerRank,
    (numpy_scalar.__module__, numpy_scalar.__qualname__): numpy_scalar,
}
_WAY_OUT = "put tensors and plain values (numbers, strings, lists, dictionaries) into the state"
_VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
    | {Tensor, torch.nn.Parameter}
)
_KEYS = frozenset({str, int})
_DICTIONARIES = frozenset({dict, OrderedDict, Counter, PerRank})
_SEQUENCES = frozenset({list, tuple, set})

# Errors that pickle raises for malformed bytes besides its own, and torch for impossible shapes.
_MALFORMED = (AttributeError, EOFError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError)

Shape = tuple[int, ...]
# A tensor in a skeleton: its type, its shape, and for each box its offsets, its sizes and where its bytes begin.
# If it is dense but not contiguous (channels_last), its strides follow. It has one box then.
Reference = tuple[Any, ...]
# Makes the stand-in for a tensor from its type, shape and boxes.
Place = Callable[..., object]


class NotPlain(TypeError):
    """A value that cannot be kept: it is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: it lies at `offsets`, and its bytes are in the data from `begin` on."""

    offsets: Shape
    sizes: Shape
    begin: int


@dataclass(frozen=True)
class Boxed:
    """A tensor in a region: its type, its whole shape, and the boxes that the region has."""

    dtype: torch.dtype
    size: Shape
    boxes: tuple[Box, ...]

    def view(self, box: Box, data: Tensor) -> Tensor:
        """A box as a view of a region's data."""
        return view(data, self.dtype, box.sizes, box.begin)


def pack(state: object, places: Placer | None = None) -> Packed:
    """Disassemble `state`: dictionaries, lists and tuples of dense tensors and plain values. Raises NotPlain.

    `places` decides which part of each tensor goes into the region: by default all.
    """
    content = io.BytesIO()
    places = places or Placer()
    _Pickler(content, places).dump(state)
    length = up(places.end, PAGE)
    return Packed(content.getvalue(), places.tensors, places.offsets, length)


def extended(packed: Packed, nest: object) -> Packed:
    """`packed` with another nest appended, which `describe` reads too. Raises NotPlain."""
    content = io.BytesIO()
    places = Placer(begin=packed.data_length)
    _Pickler(content, places).dump(nest)
    return Packed(
        packed.skeleton + content.getvalue(),
        [*packed.tensors, *places.tensors],
        [*packed.offsets, *places.offsets],
        up(places.end, PAGE),
    )


def unpack(region: Tensor, header: Header) -> Any:
    """The state, with tensors that are views of `region`. Raises UnpicklingError or ValueError if it is not valid."""
    data = data_of(region, header)

    def whole(dtype: torch.dtype, size: Shape, boxes: Any, strides: Shape | None = None) -> Tensor:
        for offsets, sizes, begin in boxes:
            if sizes == size and offsets == (0,) * len(size):
                if strides is not None:
                    return _strided(data, dtype, size, begin, strides)
                return view(data, dtype, size, begin)
        raise ValueError(f"only a part of a tensor of shape {size!r:.80} is there")

    return _load(skeleton_of(region, header), whole)[0]


def describe(skeleton: bytes, data_length: int) -> list[Any]:
    """Each nest with a Boxed in place of each tensor. Raises UnpicklingError or ValueError if it is not valid."""

    def boxed(dtype: torch.dtype, size: Shape, boxes: Any) -> Boxed:
        # Without strides: these are pieces of a sharded state.
        dimensions = len(size)
        tensor = Boxed(dtype, _shape(size, dimensions), tuple(_box(box, dimensions) for box in boxes))
        for box in tensor.boxes:
            if any(at + size > whole for at, size, whole in zip(box.offsets, box.sizes, tensor.size, strict=True)):
                raise ValueError(f"a box at {box.offsets} with {box.sizes} is not part of {tensor.size}")
            if box.begin % dtype.itemsize or box.begin + math.prod(box.sizes) * dtype.itemsize > data_length:
                raise ValueError(f"a box of {box.sizes} at {box.begin} is not in {data_length} bytes")
        return tensor

    return _load(skeleton, boxed)


def values(skeleton: bytes) -> Any:
    """The first nest with None in place of each tensor. Raises UnpicklingError or ValueError if it is not valid."""
    return _load(skeleton, lambda *_: None)[0]


def pack_plain(tree: Tree) -> bytes:
    """The plain values of a state and the paths of its tensors, for `unpack_plain`."""
    held = {"plain": tree.plain, "tensors": tree.common(), "per_rank": list(tree.per_rank)}
    return pack(held).skeleton


def unpack_plain(content: bytes | bytearray) -> tuple[Any, dict[str, Path], list[Path]]:
    """What `pack_plain` was given: plain values, paths of tensors by name, paths of PerRanks.

    `content` is untrusted: raises UnpicklingError or ValueError if it is not valid.
    """
    scan(content)
    held = values(bytes(content))
    # A value takes at least a byte, unless it refers to an earlier one.
    require_shallow_value(held, 4 * len(content))
    return held["plain"], held["tensors"], held["per_rank"]


def _load(skeleton: bytes, place: Place) -> list[Any]:
    file, nests = io.BytesIO(skeleton), list[Any]()
    try:
        while not nests or file.tell() < len(skeleton):
            nests.append(_StateUnpickler(file, place).load())
        return nests
    except _MALFORMED as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise pickle.UnpicklingError(f"the skeleton cannot be read ({why})") from error


class Placer:
    """Places the tensors of a state in a region's data, one after the other from `begin` on."""

    def __init__(self, begin: int = 0) -> None:
        self.tensors: list[Tensor] = []
        self.offsets: list[int] = []
        self.end = begin
        self._known: dict[tuple[object, ...], int] = {}
        self._same: dict[object, object] = {}

    def reference(self, tensor: Tensor) -> Reference:
        """The skeleton's reference to a tensor, all of which goes into the region. Raises NotPlain."""
        require_dense(tensor)
        size, strides = self.once(tuple(tensor.shape)), self.once(tuple(tensor.stride()))
        is_reordered = strides != _contiguous_strides(size) and _is_dense(size, strides)
        # Tied weights are one tensor under two names.
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, size, strides)
        begin = self._known.get(key)
        if begin is None:
            part = tensor.detach()
            begin = self._known[key] = self._put(part.as_strided((part.numel(),), (1,)) if is_reordered else part)
        found = self.once(str(tensor.dtype).removeprefix("torch.")), size, ((self.once((0,) * len(size)), size, begin),)
        return (*found, strides) if is_reordered else found

    def put(self, part: Tensor) -> int:
        """Place a part of a tensor. Returns where its bytes begin. Raises NotPlain."""
        require_dense(part)
        return self._put(part)

    def _put(self, part: Tensor) -> int:
        begin = self.end
        self.tensors.append(part)
        self.offsets.append(begin)
        self.end = up(begin + part.numel() * part.element_size(), _ALIGNMENT)
        return begin

    def once(self, value: Any) -> Any:
        """The same object for equal values: a pickle has it once."""
        return self._same.setdefault(value, value)


def require_dense(tensor: Any) -> None:
    """Raise NotPlain for a tensor that its bytes do not fully describe."""
    kind = type(tensor)
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise NotPlain("a lazy tensor cannot be kept, since it has no shape yet; run one forward pass first")
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise NotPlain(
            f"a {kind.__module__}.{kind.__qualname__} cannot be kept, since it is made of other tensors; train in a "
            "plain type (float32, bfloat16, float8 and others are kept bit for bit), and convert after the training"
        )
    if tensor.is_sparse:
        raise NotPlain(
            "a sparse tensor cannot be kept; use dense ones (the optimizers whose state is dense with sparse=True are "
            "SparseAdam, Adagrad, and SGD without momentum)"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        what = f"of type {tensor.dtype}" if tensor.is_quantized else f"with layout {tensor.layout}"
        raise NotPlain(f"a {'nested ' * tensor.is_nested}tensor {what} cannot be kept; use dense ones")
    if tensor.is_meta:
        raise NotPlain("a tensor on the meta device cannot be kept, since it has no content; materialize it first")


def not_plain(value: object, path: str, *, durably: bool = False, deeply: bool = False) -> str:
    """A sentence about the first value in dictionaries, lists, tuples and sets that cannot be kept; "" if all can.

    `path` is the name of `value`. With `durably` it must fit into a checkpoint. Tensors are not checked, so this
    is quick, unless `deeply`.
    """
    kind = type(value)
    if durably and kind in (bytearray, frozenset):
        return f"`{path}` is a {kind.__name__}, which no checkpoint can hold; use bytes or a set"
    if deeply and isinstance(value, Tensor):
        try:
            require_dense(value)
        except NotPlain as error:
            return f"`{path}` cannot be kept: {error}"
    if (not deeply and is_quickly_plain(value)) or isinstance(value, Tensor | bytearray) or is_numpy_scalar(value):
        return ""
    if kind in _DICTIONARIES:
        for key, item in cast(dict[Any, Any], value).items():
            if found := not_plain(item, f"{path}.{key}".lstrip("."), durably=durably, deeply=deeply):
                return found
            if durably and kind is not Counter and type(key) not in (str, int) and not is_numpy_scalar(key):
                return f"`{path}` has the key {key!r:.80}, which no checkpoint can hold; use strings or integers"
            if found := not_plain(key, f"a key of {path}"):
                return found
        return ""
    if kind in _SEQUENCES or kind is frozenset:
        items = enumerate(cast(list[Any], value))
        each = (not_plain(item, f"{path}.{n}", durably=durably, deeply=deeply) for n, item in items)
        return next(filter(None, each), "")
    return "" if kind in _VALUES else f"`{path}` cannot be kept: {value!r:.80} is a {_type_of(value)}; {_WAY_OUT}"


def is_quickly_plain(value: Any) -> bool:
    """Whether a quick check shows that `not_plain` finds nothing: 1 µs, and 0.02 µs for each number or tensor."""
    kind = type(value)
    if kind in _VALUES:
        return True
    if kind in _DICTIONARIES:
        items = value.values()
        if not set(map(type, value)) <= _KEYS:
            return False
    elif kind in _SEQUENCES:
        items = value
    else:
        return False
    return set(map(type, items)) <= _VALUES or all(
        is_quickly_plain(item) for item in items if type(item) not in _VALUES
    )


def _contiguous_strides(size: Shape) -> Shape:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed(size[1:]), operator.mul, initial=1))[::-1] if size else ()


def _is_dense(size: Shape, strides: Shape) -> bool:
    """Whether the elements neither overlap in memory nor leave gaps. An empty tensor is not dense."""
    expected = 1
    for stride, length in sorted((stride, length) for stride, length in zip(strides, size, strict=True) if length > 1):
        if stride != expected:
            return False
        expected *= length
    return 0 not in size


class _Pickler(pickle.Pickler):
    """Pickles everything except tensors, for which it has references."""

    def __init__(self, file: io.BytesIO, places: Placer) -> None:
        super().__init__(file, protocol=5)
        self._places = places

    def persistent_id(self, value: Any) -> Reference | None:
        return self._places.reference(value) if isinstance(value, Tensor) else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is PerRank:
            return PerRank, (), None, None, iter(value.items())
        if isinstance(value, type) and (value.__module__, value.__qualname__) in _PLAIN:
            return NotImplemented
        if is_numpy_scalar(value):
            return numpy_scalar, (value.dtype.str, value.tobytes())
        if isinstance(value, torch.dtype) or value is numpy_scalar:
            return NotImplemented
        if (type(value).__module__, type(value).__qualname__) in _PLAIN:
            return NotImplemented
        raise NotPlain(f"{value!r:.80} of type {_type_of(value)} cannot be kept; {_WAY_OUT}")


def _type_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _StateUnpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote: plain values, and what `place` makes of a tensor's boxes."""

    def __init__(self, file: io.BytesIO, place: Place) -> None:
        super().__init__(file)
        self._place = place

    def persistent_load(self, reference: Any) -> object:
        name, size, boxes, *strides = reference
        return self._place(_dtype(name), size, boxes, *strides)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _Maker(_PLAIN[module, name])
        if module == "torch":
            return _dtype(name)
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


class _Maker:
    """Stands for a type while a skeleton is loaded: it makes values, and nothing can be set on it or on the type."""

    __slots__ = ("_kind",)

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, *args: Any) -> Any:
        return self._kind(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a type has no state")


def _strided(data: Tensor, dtype: torch.dtype, size: Shape, begin: int, strides: Any) -> Tensor:
    """A tensor that is dense but not contiguous. Raises ValueError for one that is not in `data`."""
    if not _is_dense(size, _shape(strides, len(size))):
        raise ValueError(f"{strides!r:.80} are not the strides of a tensor of shape {size!r:.80}")
    return view(data, dtype, (math.prod(size),), begin).as_strided(size, strides)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"torch.{name!s:.80} is neither a dtype nor a plain value")
    return dtype


def _box(box: Any, dimensions: int) -> Box:
    offsets, sizes, begin = box
    return Box(_shape(offsets, dimensions), _shape(sizes, dimensions), *_shape((begin,), 1))


def _shape(numbers: Any, dimensions: int) -> Shape:
    if len(numbers) != dimensions or any(type(each) is not int or not 0 <= each < 1 << 63 for each in numbers):
        raise ValueError(f"{numbers!r:.80} is not a shape of {dimensions} dimensions")
    return tuple(numbers)
