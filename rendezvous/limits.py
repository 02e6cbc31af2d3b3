"""How long a text in a record may be: programs and users write texts of any length, but a store takes 1.5 MiB.

A class that derives from `Bounded` names the limit of a text in its type. No object of that class holds a longer text:

    message: Annotated[str, keep_head(2 << 10)]

Sizes are bytes of the JSON that is sent. There a control character, and most letters beyond ASCII, take six bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import get_type_hints

_CUT = "…"
# Bytes of one character in JSON: an escaped pair of surrogates.
_CHARACTER_BYTES_MAX = 12


@dataclass(frozen=True)
class Limit:
    """At most `bytes_max` of a text; `cut` makes a longer one fit."""

    bytes_max: int
    cut: Callable[[str, int], str]

    def of(self, text: str) -> str:
        """The text itself if it fits, else the cut one."""
        return text if self.fits(text) else self.cut(text, self.bytes_max)

    def fits(self, text: str) -> bool:
        # Nearly all texts are short, and need not be encoded to see that they fit.
        is_short = len(text) * _CHARACTER_BYTES_MAX <= self.bytes_max
        return is_short or (len(text) <= self.bytes_max and size(text) <= self.bytes_max)


class Bounded:
    """A frozen dataclass whose texts with a `Limit` in their type are cut when an object is made."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, limit in _limits(kind).items():
            text = getattr(self, name)
            if not limit.fits(text):
                object.__setattr__(self, name, limit.of(text))


def size(text: str) -> int:
    """Bytes of `text` in JSON."""
    return len(json.dumps(text)) - 2


def keep_head(bytes_max: int) -> Limit:
    """A limit that keeps the beginning."""
    return Limit(bytes_max, cut_to_head)


def keep_ends(bytes_max: int) -> Limit:
    """A limit that keeps the beginning and the end."""
    return Limit(bytes_max, cut_to_ends)


def keep_tail(bytes_max: int) -> Limit:
    """A limit that keeps the end."""
    return Limit(bytes_max, cut_to_tail)


def cut_to_head(text: str, bytes_max: int) -> str:
    """The beginning, with an ellipsis after it."""
    room = bytes_max - size(_CUT)
    return text[: _characters(text, room)] + _CUT if room >= 0 else ""


def cut_to_tail(text: str, bytes_max: int) -> str:
    """The end, from the beginning of a line where there is one."""
    kept = _last(text, bytes_max)
    newline = kept.find("\n", 0, len(kept) // 2)
    return kept[newline + 1 :]


def cut_to_ends(text: str, bytes_max: int) -> str:
    """The beginning and the end, and between them a line that says how much is left out."""
    # The number in that line is never longer than the number of all characters.
    room = bytes_max - size(_left_out(len(text)))
    if room <= 0:
        return cut_to_head(text, bytes_max)
    first = text[: _characters(text, room // 2)]
    # Whole lines, where they are not very long.
    line_end = first.rfind("\n", len(first) // 2)
    first = first if line_end < 0 else first[:line_end]
    last = cut_to_tail(text, room - size(first))
    return first + _left_out(len(text) - len(first) - len(last)) + last


def _left_out(characters: int) -> str:
    return f"\n{_CUT} {characters:,} characters are left out here {_CUT}\n"


def _characters(text: str, bytes_max: int) -> int:
    """How many characters at the beginning of `text` fit into so many bytes."""
    low, high = 0, max(0, min(len(text), bytes_max))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(text[:middle]) <= bytes_max else (low, middle - 1)
    return low


def _last(text: str, bytes_max: int) -> str:
    """As much of the end as fits into so many bytes."""
    text = text[max(0, len(text) - bytes_max) :]
    return text[len(text) - _characters(text[::-1], bytes_max) :]


@cache
def _limits(kind: type) -> dict[str, Limit]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: limit
        for name, hint in hints.items()
        for limit in getattr(hint, "__metadata__", ())
        if isinstance(limit, Limit)
    }
