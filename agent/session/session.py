"""The agent's session with its store: a thread makes the requests, and retries each until it succeeds.

Nothing is decided here. The store's responses become events; a request without one is retried.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from elaunch.agent.core.events import SnapshotChanged, StoreBack, StoreEvent, StoreFailed, StoreLost, Tag, Trouble
from elaunch.agent.session.store_client import StoreClient
from elaunch.agent.session.store_view import JobStore, LocalHost, Post
from elaunch.rendezvous.store import (
    Denied,
    HeadAway,
    HistoryLost,
    OwnLimit,
    Rejected,
    StoreError,
    TimedOut,
    Txn,
    Unavailable,
)
from elaunch.rendezvous.times import Times

_OTHERS_POLL_S = 0.05
Request = Callable[[], None]


class Session:
    """One agent's session with its store.

    `post` takes events, from any thread; at each `SnapshotPending`, `snapshot()` has something new. A thread of the
    session makes the requests to a remote store; the caller makes those to a store in this process.
    """

    def __init__(self, job_store: JobStore, host: LocalHost, times: Times, post: Post) -> None:
        self._store = job_store.store
        self._post = post
        self._client = StoreClient(job_store, host, times, post)
        self._requests = RetryQueue(self._client.renew, post, times.backoff_max_s, random.uniform)
        self._is_closing = False
        self._outlast_s = 0.0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True) if job_store.is_remote else None

    # Called by the agent's loop.

    def open(self) -> None:
        """Begin a watch with a first snapshot, and a lease."""
        if self._thread:
            self._thread.start()
        self._do(self._client.begin)

    def commit(self, txn: Txn, tag: Tag | None) -> None:
        self._do(lambda: self._client.commit(txn, tag))

    def offer(self, txn: Txn, held: Callable[[], object] | None = None) -> None:
        """Commit a best-effort write, without a retry; thread-safe. If its guards held, a thread calls `held`."""
        self._do(lambda: self._client.offer(txn, held))

    def renew(self) -> None:
        self._do(self._client.new_lease)

    def widen(self) -> None:
        self._do(self._client.view.widen)

    def snapshot(self) -> SnapshotChanged | StoreLost:
        """The keys as they are now."""
        return self._client.view.snapshot()

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        return None if self._is_closing else self._client.due_s

    def tick(self, now_s: float) -> None:
        """Renew the lease, and with it find what the watch has missed."""
        with self._wake:
            if self._client.tick(now_s):
                self._requests.add_renewal()
                self._wake.notify()

    def close(self, flush_s: float, outlast_s: float = 0.0) -> None:
        """Flush pending writes, for `flush_s` at the longest, revoke the lease, and close the client.

        A store that exits with this agent stays for the other members, up to `outlast_s`: they must read the outcome.
        """
        with self._wake:
            self._is_closing = True
            self._requests.end()
            self._outlast_s = outlast_s
            self._wake.notify()
        if self._thread and self._thread.is_alive():
            self._thread.join(flush_s + outlast_s)
        self._client.view.close()
        self._store.close()

    # Called by the session's own thread; for a store in this process, by the loop.

    def _do(self, request: Request) -> None:
        if not self._thread:
            try:
                request()
            except Rejected as error:
                # This is the store in this process: a retry would not help.
                self._post(StoreLost(str(error)))
            return
        with self._wake:
            self._requests.add(request)
            self._wake.notify()

    def _work(self) -> None:
        requests, backoff_s = self._requests, 0.0
        while True:
            with self._wake:
                if backoff_s:
                    self._wake.wait_for(lambda: self._is_closing, backoff_s)
                self._wake.wait_for(lambda: requests.has_any or self._is_closing)
                if self._is_closing and requests.is_over:
                    break
            try:
                backoff_s = requests.do_next(backoff_s)
            except Exception as error:
                # A fault in a client: without this thread the agent would wait for its responses for ever.
                self._post(StoreLost(f"the store's client failed ({type(error).__name__}: {error})"))
                return
        if not requests.is_away:
            with suppress(StoreError):
                self._client.revoke()
                end_s = time.monotonic() + self._outlast_s
                while time.monotonic() < end_s and self._client.has_others():
                    time.sleep(_OTHERS_POLL_S)


FIRST_BACKOFF_S = 0.02
# A store that runs but does not respond in time is overloaded: all nodes of a large job connect at the same time.
# An agent without a lease can wait; one with a lease must reconnect before it expires.
SLOW_BACKOFF_MAX_S = 3.0
# A leaving agent retries its last requests this many times: a lost packet must not cost its peers a lease time.
LAST_TRIES = 3


class _Lane(Enum):
    """Renewals of the lease, and the queue of all other requests: one may be refused while the other is served."""

    RENEWAL = auto()
    QUEUE = auto()


@dataclass(eq=False)
class RetryQueue:
    """A FIFO queue of requests, and a lease renewal that goes before them all.

    Requests may come from any thread, `do_next` is called by one. `uniform` draws a number between two. Each failed try
    is posted as an event. `StoreBack` is posted when the last try of neither lane has failed.
    """

    renew: Request
    post: Callable[[StoreEvent], None]
    backoff_max_s: float
    uniform: Callable[[float, float], float]
    _queue: deque[Request] = field(default_factory=deque)
    _renewal_pending: bool = False
    _was_reached: bool = False
    # The error of each lane whose last try failed.
    _failing: dict[_Lane, Unavailable | Rejected] = field(default_factory=dict)
    # Consecutive failed tries of the queue's first request.
    _failed_tries: int = 0
    _is_ending: bool = False

    @property
    def has_any(self) -> bool:
        return bool(self._queue) or self._renewal_pending

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def add_renewal(self) -> None:
        self._renewal_pending = True

    def end(self) -> None:
        """From now on the queue goes first: a lease that is about to be revoked needs no renewal."""
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
        """Do a pending renewal and the first request. Returns the pause after them; `backoff_s` was the last one."""
        pause_s = 0.0
        for lane in self._lanes():
            # A renewal that is ordered while this one runs is done after it.
            self._renewal_pending &= lane is not _Lane.RENEWAL
            try:
                (self.renew if lane is _Lane.RENEWAL else self._queue[0])()
            except (Unavailable, Rejected) as error:
                pause_s = self._failed(lane, error, backoff_s)
                if isinstance(error, Unavailable):
                    break
                # The store responds: it may serve one lane though it refuses the other.
                continue
            except HistoryLost as error:
                self.post(StoreLost(str(error)))
            self._succeeded(lane)
        return pause_s

    def _lanes(self) -> list[_Lane]:
        renews = self._renewal_pending and not (self._is_ending and self._queue)
        return [_Lane.RENEWAL] * renews + [_Lane.QUEUE] * bool(self._queue)

    def _failed(self, lane: _Lane, error: Unavailable | Rejected, backoff_s: float) -> float:
        self._failing[lane] = error
        self._failed_tries += lane is _Lane.QUEUE
        if isinstance(error, Rejected):
            self.post(StoreFailed(str(error), Trouble.DENIED if isinstance(error, Denied) else Trouble.REFUSES))
            least_s = most_s = self.backoff_max_s
        else:
            is_heads = isinstance(error, HeadAway)
            cause = error.__cause__ if is_heads else error
            trouble = Trouble.OWN if isinstance(error, OwnLimit) else Trouble.AWAY
            if isinstance(cause, TimedOut) and not cause.is_silent:
                trouble = Trouble.SLOW
            self.post(StoreFailed(str(error), trouble, is_heads, is_heads and error.is_silent))
            least_s = FIRST_BACKOFF_S
            is_late = isinstance(cause, TimedOut) and not self._was_reached
            most_s = SLOW_BACKOFF_MAX_S if is_late else self.backoff_max_s
        self._renewal_pending |= lane is _Lane.RENEWAL
        longest_s = min(most_s, max(2 * backoff_s, least_s))
        # Jitter: all agents lose the store at the same time.
        return self.uniform(longest_s / 2, longest_s)

    def _succeeded(self, lane: _Lane) -> None:
        if lane is _Lane.QUEUE:
            self._queue.popleft()
            self._failed_tries = 0
        was_failing = self._failing.pop(lane, None) is not None
        if self._failing:
            return
        if was_failing or not self._was_reached:
            self._was_reached = True
            self.post(StoreBack())
