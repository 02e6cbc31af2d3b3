"""Numbers of bytes as people read them."""

from __future__ import annotations


def bytes_text(count: int) -> str:
    """The number of bytes as people read it."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
