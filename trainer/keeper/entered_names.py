"""The names of the Keepers that this process has entered: two of one name would overwrite each other's copies."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Hold `name` in the block. Raises ValueError if this process holds it already."""
    names, own = _names(), (os.getpid(), name)
    if own in names:
        raise ValueError(
            f"a Keeper named {name!r} is entered already, and both would write to the same copies; give each Keeper of "
            "a program its own name= (or one Keeper all of it: Keeper([model, other], [optimizer, its_optimizer]))"
        )
    names.add(own)
    try:
        yield
    finally:
        names.discard(own)


@functools.cache
def _names() -> set[tuple[int, str]]:
    """With the process: a forked child does not hold what its parent does."""
    return set()
