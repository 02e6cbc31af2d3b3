"""Strict parsing of JSON that may not come from elaunch."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The JSON value in `text`; bytes are UTF-8.

    Raises ValueError, and nothing else, for a text that is not JSON, is nested too deeply for Python, is too large for
    its memory, or holds a number that fits neither 64 bits nor a float (NaN and Infinity are not JSON).
    """
    return parse_with(ANY, text)


def parse_with(decoder: json.JSONDecoder, text: str | bytes) -> Any:
    """`parse_json` by `decoder`."""
    try:
        return decoder.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it is too large") from None


def no_constant(word: str) -> Any:
    """Raise ValueError for NaN and Infinity."""
    raise ValueError(f"{word} is not a JSON number")


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS_MAX:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _fraction(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


# Digits of a 64-bit number, with its sign.
_DIGITS_MAX = 20
ANY = json.JSONDecoder(parse_int=_whole_number, parse_float=_fraction, parse_constant=no_constant)
