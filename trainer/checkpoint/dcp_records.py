"""The records of `torch.distributed.checkpoint` (DCP), made afresh of the plain fields that a pickle holds.

DCP's `.metadata` is a pickle, and whoever may write the folder may write any other in its place: the `pickle` module
would let it set attributes of whatever it names. A record that is read here is one that DCP's own writer can have
written: each field has its type, each chunk lies in its tensor, and what is no tensor is refused. DCP's loader
unpickles bytes without any limit where it believes that they are no tensor, so it must never be told so.
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
from elaunch.trainer.state.pickles import Pickled, name_of, parse

_METADATA, _ENCODING = records.__name__, records._MEM_FORMAT_ENCODING
_LAYOUTS = {str(torch.strided): torch.strided}
# A shape of more dimensions is no tensor's.
_DIMENSIONS_MAX = 64
_Read = Callable[[Any], Any]


def loads(content: bytes) -> Any:
    """The record that a pickle holds, or its enum's member; raises pickle.UnpicklingError for anything else."""
    return _as(object)(parse(content))


def read_metadata(content: bytes) -> records.Metadata:
    """DCP's `.metadata`; raises pickle.UnpicklingError."""
    metadata: records.Metadata = _as(records.Metadata)(parse(content))
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
    raise pickle.UnpicklingError(f"it has a {name_of(value)} in place of {wanted}")


def _as(kind: type) -> _Read:
    """A function that returns the record of this kind for what a pickle holds; made once, however often it is there."""

    def read(value: Any) -> Any:
        if not isinstance(value, Pickled):
            _refuse(value, f"a {kind.__name__}")
        if value.origin not in _MAKERS:
            raise pickle.UnpicklingError(f"it names {name_of(value)}, which has no place in a checkpoint")
        made_kind, make = _MAKERS[value.origin]
        # By what it is called, before anything is made of it: what is in it might be itself.
        if not issubclass(made_kind, kind):
            _refuse(value, f"a {kind.__name__}")
        if value.made is None:
            value.made = make(value)
        return value.made

    return read


def _is(kind: type) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 63):
            _refuse(value, f"a {kind.__name__}" if kind is not int else "a length")
        return value

    return read


def _or_none(read: _Read) -> _Read:
    return lambda value: None if value is None else read(value)


def _list_of(read: _Read) -> _Read:
    return lambda value: [read(item) for item in _is(list)(value)]


def _dict_of(key: _Read, item: _Read) -> _Read:
    return lambda value: {key(name): item(its) for name, its in _is(dict)(value).items()}


def _fields(record: Pickled, **readers: _Read) -> dict[str, Any]:
    """These fields of a record, each as its reader returns it, None where there is none."""
    if record.args or type(record.state) is not dict:
        _refuse(record.state if not record.args else record.args[0], f"the fields of a {name_of(record)}")
    if unknown := [key for key in record.state if key not in readers]:
        raise pickle.UnpicklingError(f"it has a {name_of(record)} with the field {unknown[0]!r:.200}")
    return {name: read(record.state.get(name)) for name, read in readers.items()}


def _call(record: Pickled, count: int = 1) -> tuple[Any, ...]:
    """The arguments of a call."""
    if record.state is not None or len(record.args) != count:
        _refuse(record.state, f"the arguments of a {name_of(record)}")
    return record.args


def _metadata(record: Pickled) -> records.Metadata:
    fields = _fields(
        record,
        state_dict_metadata=_dict_of(_is(str), _as(records.TensorStorageMetadata)),
        planner_data=_dict_of(_is(str), _path),
        storage_data=_dict_of(_as(records.MetadataIndex), _as(_StorageInfo)),
        storage_meta=lambda _: None,
        version=_or_none(_is(str)),
    )
    return records.Metadata(**{name: its for name, its in fields.items() if its is not None})


def _path(value: Any) -> tuple[str | int, ...]:
    if type(value) is not tuple or not value or any(type(key) not in (str, int) for key in value):
        _refuse(value, "a path")
    return value


def _tensor(record: Pickled) -> records.TensorStorageMetadata:
    found = records.TensorStorageMetadata(
        **_fields(
            record,
            properties=_as(records.TensorProperties),
            size=_as(torch.Size),
            chunks=_list_of(_as(records.ChunkStorageMetadata)),
        )
    )
    for part in found.chunks:
        ends = [offset + length for offset, length in zip(part.offsets, part.sizes, strict=True)]
        if len(ends) != len(found.size) or any(end > most for end, most in zip(ends, found.size, strict=True)):
            raise pickle.UnpicklingError(f"it has a chunk that does not lie in its tensor of shape {tuple(found.size)}")
    return found


def _properties(record: Pickled) -> records.TensorProperties:
    if record.args or type(record.state) is not tuple or len(record.state) != 5:
        _refuse(record.state, "a tensor's properties")
    dtype, layout, requires_grad, encoding, pin_memory = record.state
    # Which is deprecated, and contiguous in all that is written here.
    _as(Enum)(encoding)
    return records.TensorProperties(
        dtype=_dtype(dtype),
        layout=_as(torch.layout)(layout),
        requires_grad=_is(bool)(requires_grad),
        pin_memory=_is(bool)(pin_memory),
    )


def _chunk(record: Pickled) -> records.ChunkStorageMetadata:
    found = records.ChunkStorageMetadata(**_fields(record, offsets=_as(torch.Size), sizes=_as(torch.Size)))
    if len(found.offsets) != len(found.sizes):
        raise pickle.UnpicklingError("it has a chunk whose offsets and sizes differ in number")
    return found


def _index(record: Pickled) -> records.MetadataIndex:
    readers = {"fqn": _is(str), "offset": _or_none(_as(torch.Size)), "index": _or_none(_is(int))}
    return records.MetadataIndex(**_fields(record, **readers))


def _place(record: Pickled) -> _StorageInfo:
    fields = _fields(
        record, relative_path=_is(str), offset=_is(int), length=_is(int), transform_descriptors=lambda value: value
    )
    path = fields["relative_path"]
    if not is_file_name(path):
        raise pickle.UnpicklingError(f"it has {path!r:.200} in place of a file's name")
    if fields.pop("transform_descriptors"):
        raise pickle.UnpicklingError(f"{path} has been transformed, which this release does not read")
    return _StorageInfo(**fields)


def _size(record: Pickled) -> torch.Size:
    (shape,) = _call(record)
    if type(shape) is not tuple or len(shape) > _DIMENSIONS_MAX:
        _refuse(shape, "a shape")
    return torch.Size(map(_is(int), shape))


def _layout(record: Pickled) -> torch.layout:
    (name,) = _call(record)
    if _is(str)(name) not in _LAYOUTS:
        _refuse(name, "a layout of dense tensors")
    return _LAYOUTS[name]


def _encoding(record: Pickled) -> Enum:
    (value,) = _call(record)
    if type(value) is not int or value not in [member.value for member in _ENCODING]:
        _refuse(value, f"a member of {_ENCODING.__name__}")
    return _ENCODING(value)


def _member(record: Pickled) -> Enum:
    """By which Python 3.11.0 to 3.11.3 pickle an enum's member, with `getattr` itself; of nothing else is it read."""
    owner, name = _call(record, 2)
    if name_of(owner) != f"{_METADATA}.{_ENCODING.__name__}" or _is(str)(name) not in _ENCODING.__members__:
        raise pickle.UnpicklingError("it takes an attribute of what is no member of an enum")
    return _ENCODING[name]


def _dtype(named: Any) -> torch.dtype:
    module, name = getattr(named, "origin", ("", "")) if isinstance(named, type) else ("", "")
    found = getattr(torch, name, None) if module == "torch" else None
    if not isinstance(found, torch.dtype):
        _refuse(named, "a type of tensors")
    return found


# For each name: the type of its record, and the function that makes it.
_MAKERS: dict[tuple[str, str], tuple[type, Callable[[Pickled], Any]]] = {
    (_METADATA, "Metadata"): (records.Metadata, _metadata),
    (_METADATA, "TensorStorageMetadata"): (records.TensorStorageMetadata, _tensor),
    (_METADATA, "TensorProperties"): (records.TensorProperties, _properties),
    (_METADATA, "ChunkStorageMetadata"): (records.ChunkStorageMetadata, _chunk),
    (_METADATA, "MetadataIndex"): (records.MetadataIndex, _index),
    (_METADATA, _ENCODING.__name__): (Enum, _encoding),
    (_StorageInfo.__module__, "_StorageInfo"): (_StorageInfo, _place),
    ("torch.serialization", "_get_layout"): (torch.layout, _layout),
    ("torch", "Size"): (torch.Size, _size),
    ("builtins", "getattr"): (Enum, _member),
}
