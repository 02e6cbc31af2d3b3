"""Records as JSON text, the form in which they stand in the store."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def encode(record: Any) -> str:
    """`record` (a dataclass of strings, numbers, enums, tuples and dataclasses) as compact JSON."""
    return json.dumps(asdict(record), default=_plain, separators=(",", ":"))


def parse_json(text: str | bytes) -> Any:
    """The JSON value in `text`, which somebody else may have written.

    Raises ValueError, and nothing else, for what is none: also where it is nested too deeply for Python, too large for
    its memory, or holds a number that 64 bits or a float cannot hold (NaN and Infinity are not JSON).
    """
    return _parsed(text, whole=True)


def parse_first_json(text: str | bytes) -> Any:
    """The same for the value that `text` begins with, whatever follows it."""
    return _parsed(text, whole=False)


def decode(kind: type[Record], text: str) -> Record:
    """The record of class `kind` that `encode` wrote; unknown fields are ignored, so that newer writers can be read.

    Raises ValueError where the text is no such record.
    """
    try:
        return _build(kind, json.loads(text))  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a {kind.__name__}: {text[:200]!r} ({error})") from error


def _parsed(text: str | bytes, *, whole: bool) -> Any:
    try:
        words = (text if isinstance(text, str) else text.decode()).strip()
        return _DECODER.decode(words) if whole else _DECODER.raw_decode(words)[0]
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except MemoryError:
        raise ValueError("too large") from None


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS_MAX:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _fraction(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Of a 64-bit number, with its sign.
_DIGITS_MAX = 20
_DECODER = json.JSONDecoder(parse_int=_whole_number, parse_float=_fraction, parse_constant=_refuse_constant)


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
