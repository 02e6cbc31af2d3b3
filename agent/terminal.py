"""What is known of the terminal that shows a descriptor's output."""

from __future__ import annotations

import os


def can_move_cursor(fd: int) -> bool:
    """Whether it is a terminal, and not a dumb one."""
    return os.isatty(fd) and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def is_one_terminal(one: int, other: int) -> bool:
    """Whether both descriptors are the same terminal."""
    return os.isatty(one) and os.isatty(other) and os.path.samestat(os.fstat(one), os.fstat(other))


def terminal_size(fd: int) -> tuple[int, int]:
    """Columns and rows of a terminal; the usual ones if it does not know them."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns, rows = 0, 0
    return columns or 80, rows or 24
