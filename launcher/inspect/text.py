"""Numbers and times as text, for `elaunch status` and for the report (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone


def span(seconds: float) -> str:
    """A duration in two units at most: `3 s`, `2 min 3 s`, `2 h 0 min`, `3 d 4 h`."""
    whole = int(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def duration(seconds: float) -> str:
    """A short time in three digits (`16.5 ms`, `1.53 s`), a longer one as `span`; `–` if it is not known."""
    if math.isnan(seconds):
        return "–"
    if seconds >= 99.95:
        return span(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{max(seconds, 0.0) * 1000:.3g} ms"


def offset(seconds: float) -> str:
    """A moment of the job: `+0:03.2`, `+12:05`, `+1:02:03`; tenths below a minute."""
    if seconds < 59.95:
        return f"+0:{max(seconds, 0.0):04.1f}"
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"+{hours}:{minutes:02d}:{second:02d}" if hours else f"+{minutes}:{second:02d}"


def moment(at: float, utc_offset_s: int) -> str:
    """A wall clock's time in the run's own zone: `2026-11-23 11:32:27`."""
    try:
        return datetime.fromtimestamp(at, timezone(timedelta(seconds=utc_offset_s))).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def percent(share: float) -> str:
    """`97.3 %`; `100.0 %` only from a share of 1 on."""
    return "–" if math.isnan(share) else f"{min(round(100 * share, 1), 99.9 if share < 1 else 100.0):.1f} %"


def cut(text: str, length: int) -> str:
    """The text, its middle elided beyond `length`; a sentence's end names its generation."""
    return text if len(text) <= length else f"{text[: length - 60]} … {text[-50:]}"


def sentence(text: str) -> str:
    """The first line of a text as a sentence."""
    first = text.strip().partition("\n")[0]
    return f"{first[:1].upper()}{first[1:]}{'' if first.endswith('.') else '.'}" if first else ""


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
