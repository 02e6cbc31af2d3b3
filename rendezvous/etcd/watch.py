"""A watch on etcd that gets over what can be got over, in a thread and on a connection of its own."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from elaunch.rendezvous.codec import shown
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd import json_codec
from elaunch.rendezvous.etcd.errors import Kind, cancelled, judge
from elaunch.rendezvous.etcd.transport import Json, Refused, Stream
from elaunch.rendezvous.store import Deaf, Denied, Rejected, StoreError, Unavailable, Update, View

BACKOFF_MAX_S = 0.5
_BACKOFF_MIN_S = 0.02
# The member has taken the request; until it says that the watch has begun.
_BEGUN_S = 2.0
# A stream that ends sooner, and told nothing, counts as one that could not be had.
_SETTLED_S = 1.0
_JOIN_S = 0.2


class Source(Protocol):
    """The store, as a watch sees it."""

    @property
    def members(self) -> int:
        """How many there are."""
        ...

    def open(self, request: Json, attempt: int) -> tuple[Endpoint, Stream]:
        """A watch's stream from one member, another one at each attempt. Raises StoreError."""
        ...

    def read(self, *prefixes: str) -> View:
        """From any member. Raises StoreError: Denied where no member would do."""
        ...

    def heard(self, endpoint: Endpoint, answer: Json) -> None:
        """Take note of what a watch was answered. Raises HistoryLost."""
        ...

    def forget(self, watch: EtcdWatch) -> None:
        """It has ended."""
        ...


class EtcdWatch:
    """A `Watch`. After any break it goes on behind the last revision that it told."""

    def __init__(self, source: Source, prefix: str, after: int | None, tell: Callable[[Update], None]) -> None:
        self._source = source
        self._prefix = prefix
        # None before anything was told: then it begins now.
        self._after = after
        self._tell = tell
        self._lock = threading.Lock()
        self._stream: tuple[Endpoint, Stream] | None = None
        self._closed = threading.Event()
        self._error: StoreError | None = None
        self._begun_s = math.inf
        self._is_deaf = False
        self._tried = threading.Event()
        self._why_not: StoreError | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def begun(self) -> None:
        """Wait until it tells what happens, each member having been tried once; raises why none lets it begin."""
        self._tried.wait()
        if self._why_not:
            self.close()
            raise self._why_not

    def close(self) -> None:
        """Nothing is told after this returns, save what is being told."""
        self.hang_up()
        # It may be closed before it is started, by another thread.
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def hang_up(self) -> None:
        """Close it, and wait for nothing."""
        self._closed.set()
        self._answer(Unavailable("the watch was closed"))
        self._interrupt()

    def fail(self, error: StoreError) -> None:
        """Tell `error` as the last thing."""
        self._error = error
        self._interrupt()

    def leave(self, endpoint: Endpoint) -> None:
        """Go elsewhere if it listens to `endpoint`, which does not answer: an idle watch cannot see that."""
        with self._lock:
            if self._stream and self._stream[0] == endpoint:
                self._stream[1].hang_up()

    def _interrupt(self) -> None:
        with self._lock:
            if self._stream:
                self._stream[1].hang_up()

    def _over(self) -> bool:
        return self._closed.is_set() or self._error is not None

    def _run(self) -> None:
        failures = 0
        while not self._over():
            told = self._after
            try:
                self._once(failures)
                failures = 0
            except Denied as error:
                self._error = self._error or error
            except (Unavailable, Rejected) as error:
                was_good = self._after != told or time.monotonic() - self._begun_s > _SETTLED_S
                failures = 0 if was_good else failures + 1
                if failures >= self._source.members + isinstance(error, _TokenOld):
                    self._answer(Denied(str(error)) if isinstance(error, _TokenOld) else error)
                    self._say_deaf(error)
            except StoreError as error:
                self._error = self._error or error
            except Exception as error:
                # A fault of ours: somebody waits for this thread.
                self._error = Denied(f"the store's client failed ({type(error).__name__}: {error})")
            if failures and not self._over():
                wait_s = min(BACKOFF_MAX_S, _BACKOFF_MIN_S * 2 ** min(failures, 10))
                self._closed.wait(wait_s * random.uniform(0.5, 1))
        self._answer(self._error)
        if self._error and not self._closed.is_set():
            self._tell(self._error)
        self._source.forget(self)

    def _answer(self, why_not: StoreError | None) -> None:
        """To whoever waits until it has begun; the first answer stands."""
        if not self._tried.is_set():
            self._why_not = why_not
            self._tried.set()

    def _once(self, failures: int) -> None:
        """Follow one stream to its end; returns where another is to be had at once."""
        try:
            self._follow(failures)
        except (Denied, Refused) as error:
            if isinstance(error, Refused) and judge(error) is Kind.WAIT:
                raise Unavailable(str(error)) from error
            if isinstance(error, Refused) and judge(error) not in (Kind.DENY, Kind.LOGIN):
                raise Rejected(str(error)) from error
            # It may be this member's fault alone, or a token too old, of which a watch only says "permission denied":
            # what no member would let us read is denied indeed.
            self._source.read(self._prefix)
            raise _TokenOld(str(error)) from error
        except _Compacted:
            self._say_all()

    def _follow(self, attempt: int) -> None:
        self._begun_s = math.inf
        endpoint, stream = self._source.open(json_codec.watch(self._prefix, self._after), attempt)
        try:
            with self._lock:
                self._stream = endpoint, stream
            self._take(endpoint, stream.next(_BEGUN_S))
            # A watch that begins in the past waits up to 0.1 s for etcd to bring it up to the present; one that begins
            # now tells at once, and what was before is read then.
            if self._after is None:
                self._say_all()
            self._answer(None)
            self._begun_s, self._is_deaf = time.monotonic(), False
            while not self._over():
                self._take(endpoint, stream.next(None))
        finally:
            with self._lock:
                self._stream = None
            stream.close()

    def _take(self, endpoint: Endpoint, answer: Json) -> None:
        try:
            self._source.heard(endpoint, answer)
            if answer.get("canceled"):
                compacted = json_codec.compacted(answer)
                raise _Compacted if compacted else cancelled(str(answer.get("cancel_reason", "")))
            told = json_codec.changes(answer, self._after or 0)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{endpoint} tells what cannot be understood: {shown(answer)}") from error
        for changes in told:
            self._after = changes.revision
            self._say(changes)

    def _say_deaf(self, error: StoreError) -> None:
        """Tell `Deaf` once; not while the store is away, since calls report that too."""
        if isinstance(error, (Rejected, _TokenOld)) and not self._is_deaf:
            self._is_deaf = True
            self._say(Deaf(str(error)))

    def _say_all(self) -> None:
        view = self._source.read(self._prefix)
        self._after = view.revision
        self._say(view)

    def _say(self, update: Update) -> None:
        if not self._over():
            self._tell(update)


class _TokenOld(Unavailable):
    """A member denied what it then let us read: once more, with the token that the read has brought.

    If the watch is denied then too, the member lets us read but not watch. A first watch reports that.
    """


class _Compacted(Exception):
    """The store no longer has all revisions one by one."""
