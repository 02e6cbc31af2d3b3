"""The end of a training whose last checkpoint cannot be written at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from elaunch.trainer import link
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.state.version import Version

# Seconds before each new try.
_AGAIN_S = (1, 2, 4, 8, *(5,) * 9)


class NotDurable(OSError):
    """All steps are done, but every try to write the last checkpoint failed. Raised on all ranks."""


def require_durable(
    copies: Copies, version: Version, say: Callable[[str], None] | None, stop_if_asked: Callable[[], object]
) -> None:
    """Retry a failed last checkpoint for a while: a state that is only in memory ends with the job. Collective.

    `say` is None on all ranks but the first. Raises NotDurable.
    """
    for again_s in _AGAIN_S:
        if not copies.disk.failure():
            return
        if again_s == _AGAIN_S[0] and say:
            say(f"it is the last one: it is tried again for {sum(_AGAIN_S)} s")
        for _ in range(again_s):
            time.sleep(1)
            link.phase("writing the last checkpoint")
            stop_if_asked()
        copies.checkpoint(version)
        copies.wait()
    if why := copies.disk.failure():
        raise NotDurable(f"the end of the training is not on the disk: {why}")
