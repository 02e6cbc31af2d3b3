"""The names and checkpoints of this process's Keepers: two with the same ones would take each other's state."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator


@contextlib.contextmanager
def entered(name: str, memory: str, checkpoints: str) -> Iterator[None]:
    """Hold `name` and `checkpoints` in the block, and also after it if it ends without an error.

    The copies of a name are in `memory`; without one it is free after the block. Raises ValueError if this process
    holds one of them.
    """
    # With the process: a forked child does not hold what its parent does. And a restart is another program.
    program = os.getpid(), os.environ.get("ELAUNCH_GENERATION", "")
    keys = [(*program, f"named {name!r}", memory)]
    keys += [(*program, f"with checkpoints={checkpoints!r}", "")] if checkpoints else []
    for key in keys:
        if _held().get(key) == "left":
            raise ValueError(
                f"a Keeper {key[2]} has ended in this program, and this one would go on from its last state: give each "
                "training (a phase, a fold) its own name= and checkpoints=. Two loops of one training belong into one "
                "`with` block"
            )
        if key in _held():
            raise ValueError(
                f"a Keeper {key[2]} is entered already, and both would write to the same copies; give each Keeper of a "
                "program its own name= and checkpoints= (or one Keeper all of it: Keeper([model, other], [optimizer, "
                "its_optimizer]))"
            )
    _held().update(dict.fromkeys(keys, "entered"))
    try:
        yield
    except BaseException:
        # The program may catch this and try the same training again.
        for key in keys:
            del _held()[key]
        raise
    for key in keys:
        _held()[key] = "left"
    if not memory:
        del _held()[keys[0]]


def is_alone() -> bool:
    """Whether one Keeper is entered, and no other."""
    names = [key for key, how in _held().items() if how == "entered" and key[2].startswith("named")]
    return len(names) == 1


@functools.cache
def _held() -> dict[tuple[int, str, str, str], str]:
    """Whether each is "entered" or "left"."""
    return {}
