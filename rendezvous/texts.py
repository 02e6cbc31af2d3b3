"""Pieces of sentences."""

from __future__ import annotations

from collections.abc import Sequence

# What Linux takes as a host name. As JSON it is shorter than `HOST_BYTES_MAX`.
_HOST_BYTES_MAX = 64


def listed(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else "".join(items)


def node_host(hostname: str) -> str:
    """A host's name as keys, records and lines have it: Linux takes any bytes, and these need one printable word."""
    word = "".join(letter if letter.isprintable() and letter not in " /" else "-" for letter in hostname)
    return word.encode()[:_HOST_BYTES_MAX].decode(errors="ignore") or "unnamed"


def plain(text: str, keep: str = "") -> str:
    """The text for a terminal: control characters, and what turns a line around, as escapes, but those in `keep`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def bytes_text(count: float) -> str:
    """The number of bytes as people read it: "512 B", "1.5 GiB", "64 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    number = f"{size:.0f}" if size >= 100 else f"{size:.1f}".removesuffix(".0")
    return f"{number} {unit}"
