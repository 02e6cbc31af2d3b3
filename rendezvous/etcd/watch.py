"""A watch on etcd, in its own thread and on its own connection. It resumes after every error that can pass."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elaunch.rendezvous.codec import shown
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd import json_codec
from elaunch.rendezvous.etcd.errors import Kind, cancelled, kind_of
from elaunch.rendezvous.etcd.transport import EtcdError, Json, ResponseStream
from elaunch.rendezvous.store import Denied, Rejected, StoreError, Unavailable, Update

if TYPE_CHECKING:
    from elaunch.rendezvous.etcd.store import EtcdStore

BACKOFF_MAX_S = 0.5
_BACKOFF_MIN_S = 0.02
# From sending the request until the member confirms that the watch has begun.
_BEGUN_S = 2.0
# A stream that ends sooner without any update counts as a failed attempt.
_SETTLED_S = 1.0
_JOIN_S = 0.2


class EtcdWatch:
    """A `Watch`. After any interruption it continues behind the last revision that it delivered."""

    def __init__(self, store: EtcdStore, prefix: str, after: int | None, notify: Callable[[Update], None]) -> None:
        self._store = store
        self._prefix = prefix
        # None until something was delivered: the watch then begins now.
        self._after = after
        self._notify = notify
        self._lock = threading.Lock()
        self._stream: tuple[Endpoint, ResponseStream] | None = None
        self._closed = threading.Event()
        self._error: StoreError | None = None
        self._begun_s = math.inf
        self._tried = threading.Event()
        self._why_not: StoreError | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)

    def start(self) -> None:
        """Start the thread that delivers updates."""
        self._thread.start()

    def begun(self) -> None:
        """Wait until the watch has begun. Raises the reason if it could begin on no member, each tried once."""
        self._tried.wait()
        if self._why_not:
            self.close()
            raise self._store.away(self._why_not)

    def close(self) -> None:
        """Stop. After this returns no update is delivered, except one whose delivery has begun."""
        self.hang_up()
        # Another thread may close the watch before it is started.
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def hang_up(self) -> None:
        """Close the watch without waiting for its thread."""
        self._closed.set()
        self._set_tried(Unavailable("the watch was closed"))
        self.leave()

    def fail(self, error: StoreError) -> None:
        """Deliver `error` as the last update."""
        self._error = error
        self.leave()

    def leave(self, endpoint: Endpoint | None = None) -> None:
        """End the stream, if it is on `endpoint`; an idle watch cannot notice that its member hangs."""
        with self._lock:
            if self._stream and endpoint in (None, self._stream[0]):
                self._stream[1].hang_up()

    def _over(self) -> bool:
        return self._closed.is_set() or self._error is not None

    def _run(self) -> None:
        failures = 0
        while not self._over():
            before = self._after
            try:
                self._once(failures)
                failures = 0
            except Denied as error:
                self._error = self._error or error
            except (Unavailable, Rejected) as error:
                was_good = self._after != before or time.monotonic() - self._begun_s > _SETTLED_S
                failures = 0 if was_good else failures + 1
                if failures >= self._store.members + isinstance(error, _TokenOld):
                    self._set_tried(Denied(str(error)) if isinstance(error, _TokenOld) else error)
            except StoreError as error:
                self._error = self._error or error
            except Exception as error:
                # A bug in this client. The error must be reported: a caller may wait in `begun`.
                self._error = Denied(f"the store's client failed ({type(error).__name__}: {error})")
            if failures and not self._over():
                wait_s = min(BACKOFF_MAX_S, _BACKOFF_MIN_S * 2 ** min(failures, 10))
                self._closed.wait(wait_s * random.uniform(0.5, 1))
        self._set_tried(self._error)
        if self._error and not self._closed.is_set():
            self._notify(self._error)
        self._store.forget(self)

    def _set_tried(self, why_not: StoreError | None) -> None:
        """Wake the callers of `begun`. Only the first call counts."""
        if not self._tried.is_set():
            self._why_not = why_not
            self._tried.set()

    def _once(self, failures: int) -> None:
        """Follow one stream to its end. If this returns without an error, the next stream is opened immediately."""
        try:
            self._follow(failures)
        except Denied as error:
            # Perhaps only this member is wrong, or the token is too old, for which a watch gets "permission denied". A
            # read tries all members: it raises Denied if none of them allows it.
            self._store.read(self._prefix)
            raise _TokenOld(str(error)) from error
        except _Compacted:
            self._deliver_view()

    def _follow(self, attempt: int) -> None:
        self._begun_s = math.inf
        endpoint, stream = self._store.open(json_codec.watch(self._prefix, self._after), attempt)
        try:
            with self._lock:
                self._stream = endpoint, stream
            self._take(endpoint, stream.next(_BEGUN_S))
            # etcd takes up to 0.1 s to start a watch in the past. A watch from now on starts at once, so the present
            # state is read after it has started.
            if self._after is None:
                self._deliver_view()
            self._set_tried(None)
            self._begun_s = time.monotonic()
            while not self._over():
                self._take(endpoint, stream.next(None))
        except EtcdError as error:
            why = self._store.explained(endpoint, error)
            raise Denied(str(why)) if kind_of(error) is Kind.LOGIN else why from error
        finally:
            with self._lock:
                self._stream = None
            stream.close()

    def _take(self, endpoint: Endpoint, response: Json) -> None:
        try:
            self._store.observe(endpoint, response)
            if response.get("canceled"):
                compacted = json_codec.compacted(response)
                raise _Compacted if compacted else cancelled(str(response.get("cancel_reason", "")))
            received = json_codec.changes(response, self._after or 0)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{endpoint} sent an event that cannot be understood: {shown(response)}") from error
        for changes in received:
            self._after = changes.revision
            self._deliver(changes)

    def _deliver_view(self) -> None:
        view = self._store.read(self._prefix)
        self._after = view.revision
        self._deliver(view)

    def _deliver(self, update: Update) -> None:
        if not self._over():
            self._notify(update)


class _TokenOld(Unavailable):
    """A member denied the watch but allowed a read: the watch tries again with the token that the read brought.

    If the watch is denied again, the member allows reads but no watches. The first watch reports that.
    """


class _Compacted(Exception):
    """The store no longer has every revision that the watch missed."""
