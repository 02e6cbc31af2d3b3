"""The store on etcd v3, and its watches. It has several members, and one that responds is enough."""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from elaunch.rendezvous.codec import shown
from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd import json_codec
from elaunch.rendezvous.etcd.errors import PERMISSION, Kind, cancelled, explain, history_lost, kind_of
from elaunch.rendezvous.etcd.transport import EtcdError, Json, JsonTransport, ResponseStream, Rpc, RpcTransport
from elaunch.rendezvous.store import (
    SHARED,
    Denied,
    HeadAway,
    HistoryLost,
    OwnLimit,
    Rejected,
    StoreError,
    TimedOut,
    Txn,
    TxnResponse,
    Unavailable,
    Update,
    View,
)

VERSION_MIN = (3, 4)
# A password check takes 60 ms of a server's CPU, and after a restart of the server every client sends one.
_LOGIN_S = 5.0
# Between two attempts of a watch.
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.02, 0.5
# From sending the request until the member confirms that the watch has begun.
_BEGUN_S = 2.0
# A stream that ends sooner without any update counts as a failed attempt.
_SETTLED_S = 1.0
_JOIN_S = 0.2

Parsed = TypeVar("Parsed")


class EtcdStore:
    """A `Store` whose calls may come from several threads. Nothing is sent before the first call.

    A call goes to the member that responded last, then to each other member once, and waits `deadline_s` for each. With
    only one member it waits twice as long: a retry would make a slow server slower. Without a `transport` it uses the
    JSON gateway. If `access` has a bearer, the job's own served store is behind it.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        access: Access | None = None,
        deadline_s: float = 0.5,
        transport: RpcTransport | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._deadline_s = deadline_s if len(self._endpoints) > 1 else 2 * deadline_s
        self.use(access or Access(), transport)
        self._current = 0
        self._is_heads = False
        self._watches: set[EtcdWatch] = set()

    def use(self, access: Access, transport: RpcTransport | None = None) -> None:
        """Set the access and transport of all further requests."""
        self._access = access
        self._transport = transport or JsonTransport(access.tls, access.bearer)
        self._token = _Token(self._transport, access, max(_LOGIN_S, self._deadline_s))
        self._history = _History(access)

    def check(self) -> str:
        """The version of the first member that responds, or "" if only root may read it (etcd 3.5.28).

        Raises Denied if the version is too old, or the member lacks the transport.
        """
        endpoint, version = self._try_each(self._version)
        numbers = tuple(int(part) for part in version.split(".")[:2] if re.fullmatch("[0-9]{1,9}", part))
        if version and numbers < VERSION_MIN:
            raise Denied(f"{endpoint} is etcd {version}; elaunch needs {'.'.join(map(str, VERSION_MIN))} or later")
        self._is_heads = bool(self._access.bearer) and not version.endswith(SHARED)
        return version

    def _version(self, endpoint: Endpoint, token: str) -> str:
        try:
            return self._transport.version(endpoint, token, self._deadline_s)
        except EtcdError as error:
            if error.code != PERMISSION:
                raise
            return ""

    def read(self, prefix: str) -> View:
        return self._call(Rpc.RANGE, json_codec.read(prefix), json_codec.view)

    def commit(self, txn: Txn) -> TxnResponse:
        return self._call(Rpc.TXN, json_codec.commit(txn), json_codec.committed)

    def grant(self, lease: int, ttl_s: float) -> None:
        self._call(Rpc.GRANT, json_codec.grant(lease, ttl_s), lambda _: None, passing=Kind.LEASE_EXISTS)

    def keep_alive(self, lease: int) -> float:
        return self._call(
            Rpc.KEEP_ALIVE,
            json_codec.lease(lease),
            json_codec.seconds_left,
            # With one member there is nowhere to move watches to, and restarting them would slow that member more.
            timed_out=self._move_watches if len(self._endpoints) > 1 else None,
            passing=Kind.LEASE_GONE,
        )

    def revoke(self, lease: int) -> None:
        self._call(Rpc.REVOKE, json_codec.lease(lease), lambda _: None, passing=Kind.LEASE_GONE)

    def watch(self, prefix: str, after: int | None, notify: Callable[[Update], None]) -> EtcdWatch:
        watch = EtcdWatch(self, prefix, after, notify)
        self._watches.add(watch)
        watch.start()
        return watch

    def close(self) -> None:
        watches = list(self._watches)
        for watch in watches:
            watch.hang_up()
        for watch in watches:
            watch.close()
        self._transport.close()

    @property
    def members(self) -> int:
        """For a watch: the number of members."""
        return len(self._endpoints)

    def open(self, request: Json, attempt: int) -> tuple[Endpoint, ResponseStream]:
        """For a watch: a stream from the member that responds to calls, or from the `attempt`-th after it."""
        endpoint = self._endpoints[(self._current + attempt) % len(self._endpoints)]
        # Twice the deadline: after a restart of etcd all clients connect simultaneously.
        deadline_s = 2 * self._deadline_s
        return endpoint, self._with_token(
            endpoint, lambda token: self._transport.stream(endpoint, Rpc.WATCH, request, token, deadline_s)
        )

    def observe(self, endpoint: Endpoint, response: Json) -> None:
        """For a watch: check a response. Raises HistoryLost."""
        self._history.check(endpoint, response)

    def explained(self, endpoint: Endpoint, error: EtcdError) -> StoreError:
        """For a watch: the error that this member sent, as a sentence for people."""
        return explain(error, endpoint, self._access)

    def away(self, error: StoreError) -> StoreError:
        """The error itself; HeadAway in place of Unavailable if a node of the job serves the store."""
        if not self._access.bearer or not isinstance(error, Unavailable) or isinstance(error, (HeadAway, OwnLimit)):
            return error
        away = HeadAway(f"the job's store, which {self._endpoints[0].host} serves, does not respond: {error}")
        away.is_silent = error.is_silent and self._is_heads
        return away

    def forget(self, watch: EtcdWatch) -> None:
        """For a watch: it has ended."""
        self._watches.discard(watch)

    def _call(
        self,
        rpc: Rpc,
        request: Json,
        parse: Callable[[Json], Parsed],
        *,
        timed_out: Callable[[Endpoint], None] | None = None,
        passing: Kind | None = None,
    ) -> Parsed:
        self._history.raise_lost()
        # The newest revision before this call. Responses to concurrent calls may arrive in any order.
        floor = self._history.revision if rpc in (Rpc.RANGE, Rpc.TXN) else 0

        def call(endpoint: Endpoint, token: str) -> Parsed:
            try:
                response = self._transport.call(endpoint, rpc, request, token, self._deadline_s)
            except EtcdError as error:
                if kind_of(error) is not passing:
                    raise
                response = {}
            try:
                self._history.check(endpoint, response, floor)
                return parse(response)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise Rejected(f"{endpoint} sent a malformed response: {shown(response)}") from error

        try:
            return self._try_each(call, timed_out)[1]
        except HistoryLost as error:
            for watch in list(self._watches):
                watch.fail(error)
            raise

    def _try_each(
        self, call: Callable[[Endpoint, str], Parsed], timed_out: Callable[[Endpoint], None] | None = None
    ) -> tuple[Endpoint, Parsed]:
        errors: list[tuple[Endpoint, StoreError]] = []
        first = self._current
        for step in range(len(self._endpoints)):
            index = (first + step) % len(self._endpoints)
            endpoint = self._endpoints[index]
            try:
                response = self._with_token(endpoint, partial(call, endpoint))
            except (Unavailable, Rejected) as error:
                errors.append((endpoint, error))
                self._current = (index + 1) % len(self._endpoints)
                if timed_out and isinstance(error, TimedOut):
                    timed_out(endpoint)
            else:
                self._current = index
                return endpoint, response
        raise self.away(_of_all(errors)) from errors[0][1]

    def _with_token(self, endpoint: Endpoint, call: Callable[[str], Parsed]) -> Parsed:
        try:
            token = self._token.get(endpoint)
            try:
                return call(token)
            except EtcdError as error:
                if kind_of(error) is not Kind.LOGIN or not self._access.login:
                    raise
                return call(self._token.renew(endpoint, token))
        except EtcdError as error:
            raise explain(error, endpoint, self._access) from error

    def _move_watches(self, endpoint: Endpoint) -> None:
        for watch in list(self._watches):
            watch.leave(endpoint)


class EtcdWatch:
    """A `Watch`. After any interruption it resumes after the last revision that it delivered."""

    def __init__(self, store: EtcdStore, prefix: str, after: int | None, notify: Callable[[Update], None]) -> None:
        self._store = store
        self._prefix = prefix
        # None until the first delivery: a watch without a revision begins now.
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
        self._thread.start()

    def begun(self) -> None:
        """Wait until the watch has begun. Raises StoreError if no member could begin it, each tried once."""
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
        """Close the stream if it is on `endpoint` (None: any); an idle watch cannot notice that its member hangs."""
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
                wait_s = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2 ** min(failures, 10))
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
            # Perhaps only this member is wrong, or the token too old: a watch then gets "permission denied". A read
            # tries all members: it raises Denied if none of them allows it.
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
            # etcd takes up to 0.1 s to start a watch in the past. A watch from now on starts immediately, so the
            # current state is read after it has started.
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
            raise Unavailable(f"{endpoint} sent a malformed event: {shown(response)}") from error
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
    """A member denied the watch but allowed a read: the watch retries with the token that the read obtained.

    If the watch is denied again, the member allows reads but no watches, and `begun` raises Denied.
    """


class _Compacted(Exception):
    """The store no longer has every revision that the watch missed."""


def _of_all(errors: Sequence[tuple[Endpoint, StoreError]]) -> StoreError:
    """One error for the errors of all members; a reason that several members gave is named once."""
    if len(errors) == 1:
        return errors[0][1]
    members: dict[str, list[str]] = {}
    for endpoint, error in errors:
        reason, name = str(error), str(endpoint)
        is_subject = reason.startswith(name)
        members.setdefault(reason.removeprefix(name), []).extend([name] * is_subject)
    reasons = "; ".join(f"{', '.join(names)}{reason}" for reason, names in members.items())
    kinds = [error for _, error in errors]
    if all(isinstance(error, Denied) for error in kinds):
        return Denied(reasons)
    # If one member denies and another is unavailable, the denial may be that one member's fault.
    if any(isinstance(error, Rejected) for error in kinds):
        return Rejected(reasons)
    same = (kind for kind in (TimedOut, OwnLimit) if all(isinstance(error, kind) for error in kinds))
    away = next(same, Unavailable)(reasons)
    away.is_silent = all(isinstance(error, Unavailable) and error.is_silent for error in kinds)
    return away


class _Token:
    """The token that etcd gives for a user and password: requested at first use, and again when it was refused."""

    def __init__(self, transport: RpcTransport, access: Access, deadline_s: float) -> None:
        self._transport = transport
        self._access = access
        self._login = access.login
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._token = ""

    def get(self, endpoint: Endpoint) -> str:
        """The token; "" without a user. Raises EtcdError, and Denied if the password must not be sent."""
        return self._token if self._token or not self._login else self.renew(endpoint, "")

    def renew(self, endpoint: Endpoint, old: str) -> str:
        """A new token in place of `old`, which was refused. Raises EtcdError and Denied."""
        with self._lock:
            # Another thread may have renewed it.
            if self._token == old and self._login:
                self._access.check_login(endpoint)
                request = {"name": self._login.user, "password": self._login.password}
                token = self._transport.call(endpoint, Rpc.AUTHENTICATE, request, "", self._deadline_s).get("token", "")
                # The token goes into a header of every request.
                if not isinstance(token, str) or not re.fullmatch(r"[!-~]*", token):
                    raise Unavailable(f"{endpoint} answered a login with something that is not a token: {shown(token)}")
                self._token = token
            return self._token


class _History:
    """Checks that all responses come from one cluster, and that its revision never goes back."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._cluster = ""
        self._lost: HistoryLost | None = None
        self.revision = 0

    def raise_lost(self) -> None:
        """Raise HistoryLost if an earlier response showed it."""
        if self._lost:
            raise self._lost

    def check(self, endpoint: Endpoint, response: Json, floor: int = 0) -> None:
        """Check one response; its revision must not be below `floor`. Raises HistoryLost."""
        revision, cluster = json_codec.revision(response), json_codec.cluster(response)
        with self._lock:
            self._cluster = self._cluster or cluster
            if cluster not in ("", self._cluster):
                self._lost = history_lost(endpoint, self._access, f"cluster {self._cluster}", f"cluster {cluster}")
            elif revision < floor:
                self._lost = history_lost(endpoint, self._access, f"revision {floor}", f"revision {revision}")
            self.revision = max(self.revision, revision)
        self.raise_lost()
