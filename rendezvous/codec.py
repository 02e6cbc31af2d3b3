"""Records as JSON text, the form in which the store holds them, with the limits of their texts and numbers.

Programs and users write texts of any length, and a store accepts 1.5 MiB. A class that derives from `Bounded` names the
limit of a text in its type, and no object of that class holds a longer text. The range of a number is in its type too.
It is checked where a record is read, since anybody with access to the store may have written that record:

    message: Annotated[str, keep_line(2 << 10)]
    port: Annotated[int, Between(0, 65535)]

Sizes are bytes of the JSON that is sent. In JSON a control character takes six bytes, and so do most non-ASCII letters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from elaunch.rendezvous.format import plain
from elaunch.strict_json import no_constant, parse_with

Decoded = TypeVar("Decoded")

# A message shows this many characters of an unreadable text or value.
_SHOWN_MAX = 200
# Names that the command line gives. It refuses longer ones: a cut name could be the name of another job.
ROLE_BYTES_MAX = 64
RUN_ID_BYTES_MAX = 255
# The limit of host names in DNS; Linux takes 64 bytes.
HOST_BYTES_MAX = 255
_CUT = "…"
# At most this many bytes per character in JSON: an escaped pair of surrogates.
_CHARACTER_BYTES_MAX = 12
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
    return json.dumps(asdict(record), default=attrgetter("value"), separators=(",", ":"))


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
    """The object's fields. Raises ValueError for a duplicate name: two readers could see two values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is duplicated")
    return fields


# Made once: a leader reads thousands of small records. `build` checks the numbers of a record with their types.
_RECORD = json.JSONDecoder(parse_constant=no_constant, object_pairs_hook=_unique)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def build(kind: Any, value: Any) -> Any:
    """The value of type `kind` from its JSON. Raises KeyError, TypeError and ValueError."""
    # Strings and numbers first: most values are these.
    if type(value) is kind:
        return _checked(value)
    if get_origin(kind) is Annotated:
        inner, *constraints = get_args(kind)
        made = build(inner, value)
        for constraint in constraints:
            if isinstance(constraint, (Between, Name)):
                constraint.check(made)
        return made
    if get_origin(kind) in (Union, UnionType):
        inner = next(arg for arg in get_args(kind) if arg is not type(None))
        return None if value is None else build(inner, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{shown(value)} is not a list")
        return tuple(build(get_args(kind)[0], item) for item in value)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{shown(value)} is not a {kind.__name__}")
        hints = _hints(kind)
        return kind(**{name: _field(name, hint, value[name]) for name, hint in hints.items() if name in value})
    # In Python true == 1, so an enum of numbers would accept true.
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        return kind(value)
    if kind is float and type(value) is int:
        return float(_checked(value))
    raise TypeError(f"{shown(value)} is not a {kind.__name__}")


def _field(name: str, hint: Any, value: Any) -> Any:
    try:
        return build(hint, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _checked(value: Any) -> Any:
    """The value itself. Raises ValueError for a number that no record holds: sums of such numbers could overflow."""
    if type(value) is int and not -_INT_END <= value < _INT_END:
        raise ValueError("a number has more than 64 bits")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number")
    return value


@dataclass(frozen=True)
class Between:
    """The range of a number in a record."""

    low: float
    high: float = _INT_END

    def check(self, number: float) -> None:
        """Raises ValueError for a number out of range."""
        if not self.low <= number <= self.high:
            raise ValueError(f"{number} is out of range")


class Name:
    """A node's id or a host's name: a part of keys, without spaces."""

    def check(self, name: str) -> None:
        """Raises ValueError if `name` cannot be such a name."""
        # A slash would name another key, and UTF-8 has no lone surrogates.
        if not name or not name.isprintable() or "/" in name or " " in name:
            raise ValueError(f"not a node name: {name[:40]!r}")


@dataclass(frozen=True)
class Limit:
    """At most `bytes_max` bytes of a text; `cut` shortens a longer one. A line has no control characters."""

    bytes_max: int
    cut: Callable[[str, int], str]
    is_line: bool = False

    def of(self, text: str) -> str:
        """`clean(text)` if it fits, else shortened."""
        text = self.clean(text)
        return text if self.fits(text) else self.cut(text, self.bytes_max)

    def clean(self, text: str) -> str:
        """The text; of a line, only as much as could fit, without control characters."""
        return plain(text[: self.bytes_max + 1], keep="\t") if self.is_line else text

    def fits(self, text: str) -> bool:
        # Nearly all texts are so short that they fit in any encoding, and need not be encoded to find that out.
        is_short = len(text) * _CHARACTER_BYTES_MAX <= self.bytes_max
        return is_short or (len(text) <= self.bytes_max and json_bytes(text) <= self.bytes_max)


class Bounded:
    """A frozen dataclass that cuts each text with a `Limit` in its type when an object is made."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, limit in _limits(kind).items():
            text = getattr(self, name)
            if (cut := limit.of(text)) is not text:
                object.__setattr__(self, name, cut)


def json_bytes(text: str) -> int:
    """Bytes of `text` in JSON."""
    return len(json.dumps(text)) - 2


def cut_to_head(text: str, bytes_max: int) -> str:
    """The beginning, with an ellipsis after it."""
    left = bytes_max - json_bytes(_CUT)
    return _head(text, left) + _CUT if left >= 0 else ""


def cut_to_tail(text: str, bytes_max: int) -> str:
    """The end, beginning at a whole line if one begins in the first half of what is kept."""
    kept = _head(text[: -bytes_max - 1 : -1], bytes_max)[::-1]
    return kept[kept.find("\n", 0, len(kept) // 2) + 1 :]


def cut_to_ends(text: str, bytes_max: int) -> str:
    """The beginning and the end, with a line between them on how much is left out."""
    # The number in that line is never longer than the number of all characters.
    left = bytes_max - json_bytes(_left_out(len(text)))
    if left <= 0:
        return cut_to_head(text, bytes_max)
    first = _head(text, left // 2)
    # Whole lines, unless they are very long.
    line_end = first.rfind("\n", len(first) // 2)
    first = first if line_end < 0 else first[:line_end]
    last = cut_to_tail(text, left - json_bytes(first))
    return first + _left_out(len(text) - len(first) - len(last)) + last


# Limits that keep the beginning of a line, both ends, or the end. A line may come from another node's program.
keep_line = partial(Limit, cut=cut_to_head, is_line=True)
keep_ends = partial(Limit, cut=cut_to_ends)
keep_tail = partial(Limit, cut=cut_to_tail)


def _left_out(characters: int) -> str:
    return f"\n{_CUT} {characters:,} characters are left out here {_CUT}\n"


def _head(text: str, bytes_max: int) -> str:
    """As much of the beginning as fits into `bytes_max` bytes."""
    low, high = 0, max(0, min(len(text), bytes_max))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if json_bytes(text[:middle]) <= bytes_max else (low, middle - 1)
    return text[:low]


@cache
def _limits(kind: type) -> dict[str, Limit]:
    return {
        name: limit
        for name, hint in _hints(kind).items()
        for limit in getattr(hint, "__metadata__", ())
        if isinstance(limit, Limit)
    }
