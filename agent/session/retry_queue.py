"""Requests to the store, one after the other, each repeated until the store does it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from elaunch.agent.core.events import StoreBack, StoreEvent, StoreFailed, StoreLost, Trouble
from elaunch.rendezvous.store import Denied, HeadAway, HistoryLost, OwnLimit, Rejected, TimedOut, Unavailable

FIRST_BACKOFF_S = 0.02
# A store that is there and does not answer in time has too much to do: all nodes of a large job ask at once. An agent
# without a lease can wait; one with a lease must be back before the lease ends.
SLOW_BACKOFF_MAX_S = 3.0
# An agent that is leaving tries its last requests this often: one lost packet must not cost its peers a lease time.
LAST_TRIES = 3

Request = Callable[[], None]


class _Lane(Enum):
    """Renewals of the lease, and the queue of all other requests: one may be refused while the other is served."""

    RENEWAL = auto()
    QUEUE = auto()


class RetryQueue:
    """A queue that keeps its order, and a renewal that goes before all that waits.

    Orders may come from any thread, `do_next` is called by one. `uniform` draws a number between two. Each failed try
    is posted as an event. `StoreBack` is posted when the last try of neither lane has failed.
    """

    def __init__(
        self,
        renew: Request,
        post: Callable[[StoreEvent], None],
        backoff_max_s: float,
        uniform: Callable[[float, float], float],
    ) -> None:
        self._renew = renew
        self._post = post
        self._backoff_max_s = backoff_max_s
        self._uniform = uniform
        self._queue: deque[Request] = deque()
        self._renewal_wanted = False
        self._was_reached = False
        # The error of each lane whose last try failed.
        self._failing: dict[_Lane, Unavailable | Rejected] = {}
        # Tries in a row that failed, of the queue's first request.
        self._failed_tries = 0
        self._is_ending = False

    @property
    def has_any(self) -> bool:
        return bool(self._queue) or self._renewal_wanted

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def add_renewal(self) -> None:
        self._renewal_wanted = True

    def end(self) -> None:
        """From now on the queue goes first: a lease that is about to be given back needs no renewal."""
        self._is_ending = True

    @property
    def is_away(self) -> bool:
        """Whether the last try did not reach the store."""
        return any(isinstance(error, Unavailable) for error in self._failing.values())

    @property
    def is_over(self) -> bool:
        """Whether an agent that is leaving need not wait for the rest of the queue."""
        is_denied = isinstance(self._failing.get(_Lane.QUEUE), Denied)
        return self._failed_tries >= LAST_TRIES or is_denied or not self._queue

    def do_next(self, backoff_s: float) -> float:
        """Do a renewal that is wanted, and the first request; the pause after it. `backoff_s` was the last pause."""
        pause_s = 0.0
        for lane in self._lanes():
            # A renewal that is ordered while this one runs is wanted once more.
            self._renewal_wanted &= lane is not _Lane.RENEWAL
            try:
                (self._renew if lane is _Lane.RENEWAL else self._queue[0])()
            except (Unavailable, Rejected) as error:
                pause_s = self._failed(lane, error, backoff_s)
                if isinstance(error, Unavailable):
                    break
                # The store answers: it may do what one lane asks though it refuses the other.
                continue
            except HistoryLost as error:
                self._post(StoreLost(str(error)))
            self._succeeded(lane)
        return pause_s

    def _lanes(self) -> list[_Lane]:
        wants_renewal = self._renewal_wanted and not (self._is_ending and self._queue)
        return [_Lane.RENEWAL] * wants_renewal + [_Lane.QUEUE] * bool(self._queue)

    def _failed(self, lane: _Lane, error: Unavailable | Rejected, backoff_s: float) -> float:
        self._failing[lane] = error
        self._failed_tries += lane is _Lane.QUEUE
        if isinstance(error, Rejected):
            self._post(StoreFailed(str(error), Trouble.DENIED if isinstance(error, Denied) else Trouble.REFUSES))
            least_s = most_s = self._backoff_max_s
        else:
            is_heads = isinstance(error, HeadAway)
            cause = error.__cause__ if is_heads else error
            trouble = Trouble.OWN if isinstance(error, OwnLimit) else Trouble.AWAY
            if isinstance(cause, TimedOut) and not cause.is_silent:
                trouble = Trouble.SLOW
            self._post(StoreFailed(str(error), trouble, is_heads, is_heads and error.is_silent))
            least_s = FIRST_BACKOFF_S
            is_late = isinstance(cause, TimedOut) and not self._was_reached
            most_s = SLOW_BACKOFF_MAX_S if is_late else self._backoff_max_s
        self._renewal_wanted |= lane is _Lane.RENEWAL
        longest_s = min(most_s, max(2 * backoff_s, least_s))
        # Many agents lose the same store at the same moment.
        return self._uniform(longest_s / 2, longest_s)

    def _succeeded(self, lane: _Lane) -> None:
        if lane is _Lane.QUEUE:
            self._queue.popleft()
            self._failed_tries = 0
        was_failing = self._failing.pop(lane, None) is not None
        if self._failing:
            return
        if was_failing or not self._was_reached:
            self._was_reached = True
            self._post(StoreBack())
