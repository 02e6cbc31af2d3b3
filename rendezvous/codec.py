"""Records as JSON text, the form in which the store holds them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from elaunch.strict_json import ANY, no_constant, parse_with

Decoded = TypeVar("Decoded")

# A message shows this many characters of an unreadable text or value.
_SHOWN_MAX = 200
# A record's whole numbers are generations, ranks, ports, pids and exit codes.
_INT_END = 1 << 63


def shown(value: object) -> str:
    """`repr(value)` for a message, cut to a readable length. Never raises, even if the value is nested deeply."""
    try:
        text = repr(value)
    except RecursionError:
        return "something deeply nested"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def shown_text(text: str) -> str:
    """The head of `text`, which may be a broken record, for a message: only what is before a secret."""
    return re.split("[\"']secret", text[:_SHOWN_MAX], maxsplit=1)[0]


def encode(record: Any) -> str:
    """`record` (of strings, numbers, enums, tuples and records) as compact JSON."""
    return json.dumps(asdict(record), default=_plain, separators=(",", ":"))


def parse_first_json(text: str | bytes) -> Any:
    """`parse_json` for the value at the beginning of `text`, whatever follows it."""
    return parse_with(ANY, text, whole=False)


def decode(kind: type[Decoded], text: str) -> Decoded:
    """The record of class `kind` that `encode` wrote. Unknown fields are ignored, since a newer release may write them.

    Raises ValueError if the text is no such record.
    """
    try:
        return build(kind, parse_with(_RECORD, text))  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a {kind.__name__}: {shown_text(text)!r} ({shown_text(str(error))})") from error


def decode_fields(hints: Mapping[str, Any], fields: Any) -> dict[str, Any]:
    """The values of the fields in `hints`, with their types. Raises KeyError, TypeError and ValueError."""
    return {name: build(hint, fields[name]) for name, hint in hints.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object's fields. Raises ValueError if a name stands twice: two readers could see two values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is there twice")
    return fields


# Made once: a leader reads thousands of small records. `build` checks the numbers of a record with their types.
_RECORD = json.JSONDecoder(parse_constant=no_constant, object_pairs_hook=_unique)


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no JSON form")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def build(kind: Any, value: Any) -> Any:
    """The value of type `kind` from its JSON. Raises KeyError, TypeError and ValueError."""
    # Strings and numbers first: most values are these.
    if type(value) is kind:
        return _checked(value)
    if get_origin(kind) in (Union, UnionType):
        inner = next(arg for arg in get_args(kind) if arg is not type(None))
        return None if value is None else build(inner, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{shown(value)} is no list")
        return tuple(build(get_args(kind)[0], item) for item in value)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{shown(value)} is no {kind.__name__}")
        hints = _hints(kind)
        return kind(**{name: build(hint, value[name]) for name, hint in hints.items() if name in value})
    # In Python true == 1, so an enum of numbers would accept true.
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        return kind(value)
    if kind is float and type(value) is int:
        return float(_checked(value))
    raise TypeError(f"{shown(value)} is no {kind.__name__}")


def _checked(value: Any) -> Any:
    """The value itself. Raises ValueError for a number that no record holds: sums of such numbers could overflow."""
    if type(value) is int and not -_INT_END <= value < _INT_END:
        raise ValueError("a number has more than 64 bits")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    return value
