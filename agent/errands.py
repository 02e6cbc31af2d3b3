"""What is to be asked of the store, one thing after the other, each again and again until the store answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from elaunch.agent.events import StoreAway, StoreBack, StoreEvent, StoreLost
from elaunch.rendezvous.carrier import TimedOut
from elaunch.rendezvous.store import Denied, HeadAway, HistoryLost, Unavailable

FIRST_BACKOFF_S = 0.02
# A store that is there and does not answer in time has too much to do, with all of a large job's nodes at once. Who has
# no lease yet can wait; the others must come back sooner than theirs end.
SLOW_BACKOFF_MAX_S = 3.0
# Whoever wants to go tries its last words as often as that: one lost packet must not cost its peers a lease time.
LAST_TRIES = 3

Errand = Callable[[], None]


class Errands:
    """A queue that keeps its order, and a renewal that goes before all that waits.

    Orders may come from any thread, `do_next` is called by one. `uniform` draws a number between two.
    """

    def __init__(
        self,
        renew: Errand,
        post: Callable[[StoreEvent], None],
        backoff_max_s: float,
        uniform: Callable[[float, float], float],
    ) -> None:
        self._renew = renew
        self._post = post
        self._backoff_max_s = backoff_max_s
        self._uniform = uniform
        self._queue: deque[Errand] = deque()
        self._renewal_wanted = False
        self._was_reached = False
        self._failed_tries = 0

    @property
    def has_any(self) -> bool:
        return bool(self._queue) or self._renewal_wanted

    def order(self, errand: Errand) -> None:
        self._queue.append(errand)

    def order_renewal(self) -> None:
        self._renewal_wanted = True

    @property
    def is_away(self) -> bool:
        """Whether the last try did not reach the store."""
        return self._failed_tries > 0

    @property
    def is_over(self) -> bool:
        """Whether whoever wants to go need not wait for what is left."""
        return self._failed_tries >= LAST_TRIES or not self._queue

    def do_next(self, backoff_s: float) -> float:
        """Do what is next, if there is anything; the pause after it. `backoff_s` was the last pause."""
        is_renewal, self._renewal_wanted = self._renewal_wanted, False
        if not is_renewal and not self._queue:
            return 0.0
        try:
            (self._renew if is_renewal else self._queue[0])()
        except Unavailable as error:
            self._failed_tries += 1
            self._renewal_wanted |= is_renewal
            self._post(StoreAway(str(error), isinstance(error, HeadAway)))
            is_slow_at_first = isinstance(error, TimedOut) and not self._was_reached
            most_s = SLOW_BACKOFF_MAX_S if is_slow_at_first else self._backoff_max_s
            longest_s = min(most_s, max(2 * backoff_s, FIRST_BACKOFF_S))
            # Many agents lose the same store at the same moment.
            return self._uniform(longest_s / 2, longest_s)
        except (Denied, HistoryLost) as error:
            self._post(StoreLost(str(error), isinstance(error, Denied)))
        if not is_renewal:
            self._queue.popleft()
        if self.is_away or not self._was_reached:
            self._failed_tries, self._was_reached = 0, True
            self._post(StoreBack())
        return 0.0
