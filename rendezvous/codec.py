"""Records as JSON text, the form in which they stand in the store."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def encode(record: Any) -> str:
    """`record` (a dataclass of strings, numbers, enums, tuples and dataclasses) as compact JSON."""
    return json.dumps(asdict(record), default=_plain, separators=(",", ":"))


def decode(kind: type[Record], text: str) -> Record:
    """The record of class `kind` that `encode` wrote; unknown fields are ignored, so that newer writers can be read.

    Raises ValueError where the text is no such record.
    """
    try:
        return _build(kind, json.loads(text))  # type: ignore[no-any-return]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a {kind.__name__}: {text[:200]!r} ({error})") from error


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no JSON form")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    # Strings and numbers, which are most of all, first.
    if type(value) is kind:
        return value
    if get_origin(kind) in (Union, UnionType):
        inner = next(arg for arg in get_args(kind) if arg is not type(None))
        return None if value is None else _build(inner, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        return tuple(_build(get_args(kind)[0], item) for item in value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{name: _build(hint, value[name]) for name, hint in hints.items() if name in value})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
