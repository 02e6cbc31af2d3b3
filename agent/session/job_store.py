"""The job's store as this agent reaches it, and what a session asks of its own host."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from elaunch.process_identity import is_dead_here
from elaunch.rendezvous.rules.snapshot import Keys
from elaunch.rendezvous.store import Store


@dataclass(frozen=True)
class JobStore:
    """The store, and the names of the job's keys in it.

    `is_remote` says that it is in another process. Such a store keeps a lease only for an agent that renews it, and
    an agent watches no more of it than it needs.
    """

    store: Store
    keys: Keys
    is_remote: bool


@dataclass(frozen=True)
class LocalHost:
    """This host's `name`, and the parts of it that a test replaces.

    `draw(n)` gives n random bits, `now()` is the monotonic time. `is_dead(process)` says whether an agent's process (as
    `this_process` names it) was on this host and is gone.
    """

    name: str
    draw: Callable[[int], int] = random.SystemRandom().getrandbits
    is_dead: Callable[[str], bool] = is_dead_here
    now: Callable[[], float] = time.monotonic
