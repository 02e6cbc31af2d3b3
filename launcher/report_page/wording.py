"""Numbers and times as words of the page (pure)."""

from __future__ import annotations

import math
import signal
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from elaunch.rendezvous.texts import plain


def duration(seconds: float) -> str:
    """`16 ms`, `1.53 s`, `24.2 s`, `3 min 05 s`, `2 h 03 min` or `3 d 04 h`; `–` if it is not known."""
    if math.isnan(seconds):
        return "–"
    seconds = max(seconds, 0.0)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def offset(seconds: float) -> str:
    """A moment of the job: `+0:03.2`, `+12:05`, `+1:02:03`, `+3d 04:05`; tenths below a minute."""
    seconds = max(seconds, 0.0)
    if seconds < 60:
        return f"+0:{seconds:04.1f}" if seconds < 59.95 else "+1:00"
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    if days:
        return f"+{days}d {hours:02d}:{minutes:02d}"
    return f"+{hours}:{minutes:02d}:{second:02d}" if hours else f"+{minutes}:{second:02d}"


def moment(at: float, utc_offset_s: int) -> str:
    """A wall clock's time in the run's own zone: `2026-11-23 11:32:27`."""
    try:
        zone = timezone(timedelta(seconds=utc_offset_s))
        return datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def percent(share: float) -> str:
    """`97.3 %`; the last percent has more places, and 100 % is said only of all of it."""
    if math.isnan(share):
        return "–"
    shown = f"{100 * share:.1f}"
    return f"{100 * share:.3f} %" if shown == "100.0" and share < 1 else f"{shown} %"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def signal_words(number: int) -> str:
    """`SIGKILL`, or `signal 99`."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def cut(text: str, length: int) -> str:
    """The text with its middle left out if it is longer; a sentence's end says in which generation it was."""
    return text if len(text) <= length else f"{text[: length - 60]} … {text[-50:]}"


def printable(text: str) -> str:
    """The text with control characters spelled out: a log may hold anything, also what turns a line around."""
    return plain(text, keep="\n\t")
