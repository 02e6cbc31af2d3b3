"""The records of `torch.distributed.checkpoint` (DCP), made afresh of the plain fields that a pickle holds.

A record that is read is one that DCP's own writer can have written: each field has its type, each chunk lies in its
tensor, and what is no tensor is refused. DCP's loader unpickles bytes without any limit where it believes that they are
no tensor, so it must never be told so.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo

from elaunch.trainer.checkpoint.manifest import is_file_name
from elaunch.trainer.checkpoint.record_pickle import Name, PickledRecord, parse

_METADATA = records.__name__
_ENCODINGS = {_METADATA: {records._MEM_FORMAT_ENCODING.__name__: records._MEM_FORMAT_ENCODING}}
_LAYOUTS = {str(torch.strided): torch.strided}
# A shape of more dimensions is no tensor's.
_DIMENSIONS_MAX = 64


def loads(content: bytes) -> Any:
    """The record that a pickle holds, or its enum's member; raises pickle.UnpicklingError for anything else."""
    value = parse(content)
    if type(value) is not PickledRecord:
        _refuse(value, "a record")
    return _fresh(value)


def read_metadata(content: bytes) -> records.Metadata:
    """DCP's `.metadata`; raises pickle.UnpicklingError."""
    metadata: records.Metadata = _as(records.Metadata, parse(content))
    return metadata


def require_files(metadata: records.Metadata, lengths: Mapping[str, int]) -> None:
    """Raise pickle.UnpicklingError where a tensor is said to lie in a file, or a place of it, that is not there."""
    for index, info in metadata.storage_data.items():
        length = lengths.get(info.relative_path)
        if length is None:
            raise pickle.UnpicklingError(
                f"{index.fqn!r:.200} is said to lie in {info.relative_path!r:.200}, which is no file of the checkpoint"
            )
        if info.offset + info.length > length:
            raise pickle.UnpicklingError(f"{index.fqn!r:.200} is said to lie behind the end of {info.relative_path}")


def _refuse(value: object, wanted: str) -> NoReturn:
    # Not its text: it may nest without end.
    what = f"a {value.name}" if type(value) is PickledRecord else f"a {type(value).__name__}"
    raise pickle.UnpicklingError(f"it has {what} in place of {wanted}")


def _as(kind: type, value: Any) -> Any:
    """The record of this kind that `value` stands for; made once, however often the pickle refers to it."""
    if type(value) is not PickledRecord:
        _refuse(value, f"a {kind.__name__}")
    # By what it is called, before anything is made of it: what is in it might be itself.
    if _maker(value)[0] is not kind:
        _refuse(value, f"a {kind.__name__}")
    return _fresh(value)


def _fresh(record: PickledRecord) -> Any:
    if record.made is None:
        record.made = _maker(record)[1](record)
    return record.made


def _maker(record: PickledRecord) -> tuple[type, Callable[[PickledRecord], Any]]:
    found = _MAKERS.get((record.name.module, record.name.name))
    if found is None:
        raise pickle.UnpicklingError(f"it names {record.name}, which has no place in a checkpoint")
    return found


def _fields(record: PickledRecord, *names: str) -> list[Any]:
    """These fields of a record, None where it has none."""
    if record.args:
        _refuse(record.args[0], f"a {record.name} without arguments")
    if type(record.state) is not dict:
        _refuse(record.state, f"the fields of a {record.name}")
    if unknown := [key for key in record.state if key not in names]:
        raise pickle.UnpicklingError(f"it has a {record.name} with the field {unknown[0]!r:.200}")
    return [record.state.get(name) for name in names]


def _call(record: PickledRecord) -> tuple[Any, ...]:
    """The arguments of a call."""
    if record.state is not None:
        raise pickle.UnpicklingError(f"it gives a state to a {record.name}")
    return record.args


def _items(value: Any, wanted: str) -> list[tuple[Any, Any]]:
    if type(value) is not dict:
        _refuse(value, wanted)
    return list(value.items())


def _list(value: Any, wanted: str) -> list[Any]:
    if type(value) is not list:
        _refuse(value, wanted)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        _refuse(value, "a text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0 or value >= 1 << 63:
        _refuse(value, "a length")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        _refuse(value, "True or False")
    return value


def _metadata(record: PickledRecord) -> records.Metadata:
    tensors, paths, places, _, version = _fields(
        record, "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"
    )
    return records.Metadata(
        state_dict_metadata={
            _text(name): _as(records.TensorStorageMetadata, entry) for name, entry in _items(tensors, "tensors by name")
        },
        planner_data={_text(name): _path(path) for name, path in _items(paths, "paths by name")},
        storage_data={
            _as(records.MetadataIndex, index): _as(_StorageInfo, info) for index, info in _items(places, "places")
        },
        version=None if version is None else _text(version),
    )


def _path(value: Any) -> tuple[str | int, ...]:
    if type(value) is not tuple or not value or any(type(key) not in (str, int) for key in value):
        _refuse(value, "a path")
    return value


def _tensor(record: PickledRecord) -> records.TensorStorageMetadata:
    properties, size, chunks = _fields(record, "properties", "size", "chunks")
    whole = _as(torch.Size, size)
    parts = [_as(records.ChunkStorageMetadata, chunk) for chunk in _list(chunks, "a tensor's chunks")]
    for part in parts:
        ends = [offset + length for offset, length in zip(part.offsets, part.sizes, strict=True)]
        if len(ends) != len(whole) or any(end > length for end, length in zip(ends, whole, strict=True)):
            raise pickle.UnpicklingError(f"it has a chunk that does not lie in its tensor of shape {tuple(whole)}")
    return records.TensorStorageMetadata(_as(records.TensorProperties, properties), whole, parts)


def _properties(record: PickledRecord) -> records.TensorProperties:
    state = record.state
    if record.args or type(state) is not tuple or len(state) != 5:
        _refuse(state, "a tensor's properties")
    dtype, layout, requires_grad, encoding, pin_memory = state
    # Which is deprecated, and contiguous in all that is written here.
    _enum(encoding)
    return records.TensorProperties(
        dtype=_dtype(dtype),
        layout=_as(torch.layout, layout),
        requires_grad=_flag(requires_grad),
        pin_memory=_flag(pin_memory),
    )


def _enum(value: Any) -> Enum:
    if type(value) is not PickledRecord or not issubclass(_maker(value)[0], Enum):
        _refuse(value, "a memory format")
    member: Enum = _fresh(value)
    return member


def _chunk(record: PickledRecord) -> records.ChunkStorageMetadata:
    offsets, sizes = (_as(torch.Size, field) for field in _fields(record, "offsets", "sizes"))
    if len(offsets) != len(sizes):
        raise pickle.UnpicklingError("it has a chunk whose offsets and sizes differ in number")
    return records.ChunkStorageMetadata(offsets, sizes)


def _index(record: PickledRecord) -> records.MetadataIndex:
    name, offset, index = _fields(record, "fqn", "offset", "index")
    return records.MetadataIndex(
        _text(name),
        None if offset is None else _as(torch.Size, offset),
        None if index is None else _count(index),
    )


def _place(record: PickledRecord) -> _StorageInfo:
    path, offset, length, transforms = _fields(record, "relative_path", "offset", "length", "transform_descriptors")
    if not is_file_name(_text(path)):
        raise pickle.UnpicklingError(f"it has {path!r:.200} in place of a file's name")
    if transforms:
        raise pickle.UnpicklingError(f"{path} has been transformed, which this release does not read")
    return _StorageInfo(path, _count(offset), _count(length))


def _size(record: PickledRecord) -> torch.Size:
    args = _call(record)
    if len(args) != 1 or type(args[0]) is not tuple or len(args[0]) > _DIMENSIONS_MAX:
        _refuse(args, "a shape")
    return torch.Size([_count(number) for number in args[0]])


def _layout(record: PickledRecord) -> torch.layout:
    args = _call(record)
    if len(args) != 1 or _text(args[0]) not in _LAYOUTS:
        _refuse(args, "a layout of dense tensors")
    return _LAYOUTS[args[0]]


def _encoding(record: PickledRecord) -> Enum:
    kind = _ENCODINGS[record.name.module][record.name.name]
    args = _call(record)
    for member in kind:
        if len(args) == 1 and type(args[0]) is int and args[0] == member.value:
            return member
    raise pickle.UnpicklingError(f"it has what is no member of {record.name}")


def _member(record: PickledRecord) -> Enum:
    """By which Python 3.11.0 to 3.11.3 pickle an enum's member, with `getattr` itself; of nothing else is it read."""
    args = _call(record)
    if len(args) == 2 and type(args[0]) is Name and type(args[1]) is str:
        owner, name = args
        kind = _ENCODINGS.get(owner.module, {}).get(owner.name)
        if kind is not None and name in kind.__members__:
            return kind[name]
    raise pickle.UnpicklingError("it takes an attribute of what is no member of an enum")


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not Name:
        _refuse(name, "a type of tensors")
    found = getattr(torch, name.name, None) if name.module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise pickle.UnpicklingError(f"it names {name}, which is no type of tensors")
    return found


# For each name: the type of its record, and the function that makes it.
_MAKERS: dict[tuple[str, str], tuple[type, Callable[[PickledRecord], Any]]] = {
    (_METADATA, "Metadata"): (records.Metadata, _metadata),
    (_METADATA, "TensorStorageMetadata"): (records.TensorStorageMetadata, _tensor),
    (_METADATA, "TensorProperties"): (records.TensorProperties, _properties),
    (_METADATA, "ChunkStorageMetadata"): (records.ChunkStorageMetadata, _chunk),
    (_METADATA, "MetadataIndex"): (records.MetadataIndex, _index),
    (_METADATA, records._MEM_FORMAT_ENCODING.__name__): (Enum, _encoding),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): (_StorageInfo, _place),
    ("torch.serialization", "_get_layout"): (torch.layout, _layout),
    ("torch", "Size"): (torch.Size, _size),
    ("builtins", "getattr"): (Enum, _member),
}
