"""The agent's session with its store: a thread makes the requests, and repeats each until the store has done it.

Nothing is decided here. What the store says becomes events; what it does not answer is tried again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elaunch.agent.core.events import Looked, StoreEvent, StoreLost, Tag
from elaunch.agent.inbox import LookAgain
from elaunch.agent.session.retry_queue import Request, RetryQueue
from elaunch.agent.session.store_client import StoreClient
from elaunch.agent.session.store_view import JobStore, LocalHost
from elaunch.rendezvous.store import Rejected, StoreError, Txn
from elaunch.rendezvous.times import Times

_OTHERS_POLL_S = 0.05


class Session:
    """One agent's session with its store.

    `post` takes events, from any thread; at each `LookAgain`, `look()` has something new. A remote store is asked by a
    thread of the session's own, kept in touch with by `tick`; one in this process is asked at once, by the caller.
    """

    def __init__(
        self, job_store: JobStore, host: LocalHost, times: Times, post: Callable[[StoreEvent | LookAgain], None]
    ) -> None:
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
        """Begin: a first look, word of what changes from then on, and a lease."""
        if self._thread:
            self._thread.start()
        self._do(self._client.begin)

    def commit(self, txn: Txn, tag: Tag | None) -> None:
        self._do(lambda: self._client.commit(txn, tag))

    def offer(self, txn: Txn, held: Callable[[], object] | None = None) -> None:
        """Commit what nothing depends on, once; any thread may call it. `held` is called, in any thread, if it held."""
        self._do(lambda: self._client.offer(txn, held))

    def renew(self) -> None:
        """Let go of the lease and begin another, under a new name."""
        self._do(self._client.new_lease)

    def widen(self) -> None:
        """Look at all of the job's keys from now on."""
        self._do(self._client.widen)

    def look(self) -> Looked | StoreLost:
        """What the keys say now."""
        return self._client.look()

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        return None if self._is_closing else self._client.due_s

    def tick(self, now_s: float) -> None:
        """Keep the lease, and find what the watch did not tell."""
        with self._wake:
            if self._client.tick(now_s, self._requests):
                self._wake.notify()

    def close(self, flush_s: float, outlast_s: float = 0.0) -> None:
        """Let the last words be heard, for `flush_s` at the longest, give the lease back, and let go of the store.

        A store that ends with this agent stays for the other members, up to `outlast_s`: they have to read the outcome.
        """
        with self._wake:
            self._is_closing = True
            self._requests.end()
            self._outlast_s = outlast_s
            self._wake.notify()
        if self._thread and self._thread.is_alive():
            self._thread.join(flush_s + outlast_s)
        self._client.close()
        self._store.close()

    # Called by the session's own thread; for a store in this process, by the loop.

    def _do(self, request: Request) -> None:
        if not self._thread:
            try:
                request()
            except Rejected as error:
                # This is the store in this process: nobody can mend it.
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
                # A fault in a client: without this thread the agent would wait for its answers for ever.
                self._post(StoreLost(f"the store's client failed ({type(error).__name__}: {error})"))
                return
        if not requests.is_away:
            with suppress(StoreError):
                self._client.give_back()
                end_s = time.monotonic() + self._outlast_s
                while time.monotonic() < end_s and self._client.has_others():
                    time.sleep(_OTHERS_POLL_S)
