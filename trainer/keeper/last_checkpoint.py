"""The end of a training whose last checkpoint cannot be written at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from elaunch.trainer import link
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.state.version import Version

# Seconds before each new try.
_AGAIN_S = (1, 2, 4, 8, *(5,) * 9)
# Nothing else is said meanwhile: a person who looks must see what the job waits for.
_SAID_EVERY_S = 10


class NotDurable(OSError):
    """All steps are done, but every try to write the last checkpoint failed. Raised on all ranks."""


def require_durable(
    copies: Copies, version: Version, say: Callable[[str], None] | None, stop_if_asked: Callable[[], object]
) -> None:
    """Retry a failed last checkpoint for a while: a state that is only in memory ends with the job. Collective.

    `say` is None on all ranks but the first. Raises NotDurable.
    """
    left_s = sum(_AGAIN_S)
    say_at_s = left_s - _SAID_EVERY_S
    for again_s in _AGAIN_S:
        why = copies.disk.failure()
        if not why:
            return
        if say and left_s == sum(_AGAIN_S):
            say(f"it is the last one: it is tried again for {left_s} s; repair that meanwhile, or the program fails")
        for _ in range(again_s):
            time.sleep(1)
            left_s -= 1
            if say and 0 < left_s == say_at_s:
                say_at_s -= _SAID_EVERY_S
                say(f"{why}; it is tried again for {left_s} s")
            link.phase("writing the last checkpoint")
            stop_if_asked()
        copies.checkpoint(version)
        copies.wait()
    if why := copies.disk.failure():
        raise NotDurable(f"the end of the training is not on the disk: {why}")
