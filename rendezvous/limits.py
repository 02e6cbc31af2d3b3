"""How long the texts in a record may be. Programs and users write texts of any length; a store accepts 1.5 MiB.

A class that derives from `Bounded` names the limit of a text in its type. No object of that class holds a longer text:

    message: Annotated[str, keep_head(2 << 10)]

Sizes are bytes of the JSON that is sent. In JSON a control character takes six bytes, and so do most non-ASCII letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import get_type_hints

from elaunch.rendezvous.texts import plain

# Names that the command line gives. It refuses longer ones: a cut name could be the name of another job.
ROLE_BYTES_MAX = 64
RUN_ID_BYTES_MAX = 255
# DNS has no longer host names, and Linux takes 64 bytes.
HOST_BYTES_MAX = 255
_CUT = "…"
# Bytes of one character in JSON: an escaped pair of surrogates.
_CHARACTER_BYTES_MAX = 12


@dataclass(frozen=True)
class Limit:
    """At most `bytes_max` bytes of a text; `cut` shortens a longer one. A line has no control characters."""

    bytes_max: int
    cut: Callable[[str, int], str]
    is_line: bool = False

    def of(self, text: str) -> str:
        """The text itself if it fits, else the shortened text."""
        text = self.clean(text)
        return text if self._has_room(text) else self.cut(text, self.bytes_max)

    def clean(self, text: str) -> str:
        """The text, or if it is a line as much of it as could fit, without control characters."""
        return plain(text[: self.bytes_max + 1], keep="\t") if self.is_line else text

    def fits(self, text: str) -> bool:
        return self._has_room(text) and (not self.is_line or str.isprintable(text))

    def _has_room(self, text: str) -> bool:
        # Nearly all texts are so short that they fit in any encoding, and need not be encoded to find that out.
        is_short = len(text) * _CHARACTER_BYTES_MAX <= self.bytes_max
        return is_short or (len(text) <= self.bytes_max and json_bytes(text) <= self.bytes_max)


class Bounded:
    """A frozen dataclass that cuts each text with a `Limit` in its type when an object is made."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, limit in _limits(kind).items():
            text = getattr(self, name)
            if not limit.fits(text):
                object.__setattr__(self, name, limit.of(text))


def json_bytes(text: str) -> int:
    """Bytes of `text` in JSON."""
    return len(json.dumps(text)) - 2


def keep_head(bytes_max: int) -> Limit:
    """A limit that keeps the beginning."""
    return Limit(bytes_max, cut_to_head)


def keep_line(bytes_max: int) -> Limit:
    """A limit that keeps the beginning of a text for lines, which may come from another node's program."""
    return Limit(bytes_max, cut_to_head, is_line=True)


def keep_ends(bytes_max: int) -> Limit:
    """A limit that keeps the beginning and the end."""
    return Limit(bytes_max, cut_to_ends)


def keep_tail(bytes_max: int) -> Limit:
    """A limit that keeps the end."""
    return Limit(bytes_max, cut_to_tail)


def cut_to_head(text: str, bytes_max: int) -> str:
    """The beginning, with an ellipsis after it."""
    room = bytes_max - json_bytes(_CUT)
    return text[: _characters(text, room)] + _CUT if room >= 0 else ""


def cut_to_tail(text: str, bytes_max: int) -> str:
    """The end, beginning at a whole line if one begins in the first half of what is kept."""
    kept = _last(text, bytes_max)
    newline = kept.find("\n", 0, len(kept) // 2)
    return kept[newline + 1 :]


def cut_to_ends(text: str, bytes_max: int) -> str:
    """The beginning and the end, with a line between them that says how much is left out."""
    # The number in that line is never longer than the number of all characters.
    room = bytes_max - json_bytes(_left_out(len(text)))
    if room <= 0:
        return cut_to_head(text, bytes_max)
    first = text[: _characters(text, room // 2)]
    # Whole lines, unless they are very long.
    line_end = first.rfind("\n", len(first) // 2)
    first = first if line_end < 0 else first[:line_end]
    last = cut_to_tail(text, room - json_bytes(first))
    return first + _left_out(len(text) - len(first) - len(last)) + last


def _left_out(characters: int) -> str:
    return f"\n{_CUT} {characters:,} characters are left out here {_CUT}\n"


def _characters(text: str, bytes_max: int) -> int:
    """How many characters at the beginning of `text` fit into `bytes_max` bytes."""
    low, high = 0, max(0, min(len(text), bytes_max))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if json_bytes(text[:middle]) <= bytes_max else (low, middle - 1)
    return low


def _last(text: str, bytes_max: int) -> str:
    """As much of the end as fits into `bytes_max` bytes."""
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
