"""What a check has found: a grade, a sentence, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Grade(Enum):
    """How a check ended. Only `BAD` means that training fails, or cannot start."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `advice` says what to do; it is empty for a check that is ok."""

    grade: Grade
    found: str
    advice: str = ""


_ORDER = (Grade.OK, Grade.WARN, Grade.BAD)


def ok(found: str) -> Finding:
    return Finding(Grade.OK, found)


def warn(found: str, advice: str) -> Finding:
    return Finding(Grade.WARN, found, advice)


def bad(found: str, advice: str) -> Finding:
    return Finding(Grade.BAD, found, advice)


def worst(grades: Iterable[Grade]) -> Grade:
    """The worst of these grades; OK if there are none."""
    return max(grades, key=_ORDER.index, default=Grade.OK)


def span(seconds: float) -> str:
    """A length of time in words: `3 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
