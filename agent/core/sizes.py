"""Numbers of bytes as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """The number of bytes as people read it: "512 B", "1.5 GiB", "64 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    number = f"{size:.0f}" if size >= 100 else f"{size:.1f}".removesuffix(".0")
    return f"{number} {unit}"
