"""What listens at an endpoint, somebody's etcd or the job's own served store: found out when it is reached."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from elaunch.rendezvous.access import Access
from elaunch.rendezvous.dial import dial
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.http import Deadline
from elaunch.rendezvous.plan import Endpoint
from elaunch.rendezvous.resolve import resolve
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import (
    Answer,
    Denied,
    HeadAway,
    HistoryLost,
    Store,
    StoreError,
    Txn,
    Unavailable,
    Update,
    View,
    Watch,
)

# A prefix that nobody writes.
_NOTHING = "/elaunch-nothing/"

Told = TypeVar("Told")


class FoundStore:
    """A `Store` at `endpoint`: the job's own, spoken to by TLS with its token, or else an etcd, spoken to plainly.

    `token` is empty where nobody gave one. Which it is shows at the first `check` that reaches it. With `only_ours` a
    token is an order: who took the endpoint's port, and knows nothing, is not spoken to.
    """

    def __init__(
        self, endpoint: Endpoint, token: str, plainly: Access, deadline_s: float, *, only_ours: bool = False
    ) -> None:
        self._endpoint = endpoint
        self._secret = Secret(token) if token else None
        self._plainly = plainly
        self._deadline_s = deadline_s
        self._only_ours = only_ours and bool(token)
        self._found: Store | None = None
        self._is_ours = False

    def check(self) -> str:
        if self._found is None:
            is_ours = _speaks_tls(self._endpoint, self._secret, self._deadline_s)
            if not is_ours and self._only_ours:
                raise Denied(
                    f"what listens at {self._endpoint} does not know the job's token, and is somebody's etcd or worse;"
                    " if it is the one that you mean, unset ELAUNCH_TOKEN or add --rdzv-backend etcd"
                )
            self._is_ours = is_ours
            self._found = self._proven(self._secret) if is_ours and self._secret else self._store_by(self._plainly)
        return self._found.check()

    def _proven(self, secret: Secret) -> Store:
        """The job's own: our server, or an etcd that a head started, which takes a bearer for a login of its own."""
        tls = secret.client_context()
        ours = self._store_by(Access(tls=tls, bearer=secret.bearer))
        try:
            ours.read(_NOTHING)
        except StoreError as error:
            ours.close()
            if not isinstance(error, Denied):
                raise
            return self._store_by(Access(tls=tls))
        return ours

    def _store_by(self, access: Access) -> Store:
        return EtcdStore([self._endpoint], access, self._deadline_s)

    def read(self, *prefixes: str) -> View:
        return self._ask(lambda store: store.read(*prefixes))

    def commit(self, txn: Txn) -> Answer:
        return self._ask(lambda store: store.commit(txn))

    def grant(self, lease: int, ttl_s: float) -> None:
        self._ask(lambda store: store.grant(lease, ttl_s))

    def keep_alive(self, lease: int) -> float:
        return self._ask(lambda store: store.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        self._ask(lambda store: store.revoke(lease))

    def watch(self, prefix: str, after: int | None, tell: Callable[[Update], None]) -> Watch:
        def told(update: Update) -> None:
            tell(self._begun_anew() if self._is_ours and isinstance(update, HistoryLost) else update)

        return _FoundWatch(self._ask, self._ask(lambda store: store.watch(prefix, after, told)))

    def close(self) -> None:
        if self._found:
            self._found.close()

    def _ask(self, call: Callable[[Store], Told]) -> Told:
        try:
            return call(self._store)
        except Unavailable as error:
            if not self._is_ours:
                raise
            raise HeadAway(f"the job's store, which {self._endpoint.host} serves, is silent: {error}") from error
        except HistoryLost as error:
            raise (self._begun_anew() if self._is_ours else error) from error

    def _begun_anew(self) -> HistoryLost:
        return HistoryLost(
            f"the job's store on {self._endpoint.host} was started anew, and knows nothing of this job any more;"
            " start elaunch here again to take part in the new one"
        )

    @property
    def _store(self) -> Store:
        if self._found is None:
            raise Unavailable(f"the store at {self._endpoint} was not reached yet")
        return self._found


def _speaks_tls(endpoint: Endpoint, secret: Secret | None, deadline_s: float) -> bool:
    """Whether the job's own store listens there; an etcd with certificates of its own has https:// in its endpoint.

    Raises Unavailable where nothing listens, Denied where the token is not that store's.
    """
    context = secret.client_context() if secret else _trusting()
    try:
        with _connected(endpoint, deadline_s) as plain:
            try:
                context.wrap_socket(plain).close()
            except ssl.SSLCertVerificationError:
                raise Denied(
                    f"the token here is not that of the store at {endpoint}; type the line that elaunch printed there"
                ) from None
            except (ssl.SSLError, ConnectionError, TimeoutError) as error:
                if secret is None and "CERTIFICATE" in (getattr(error, "reason", None) or ""):
                    # It speaks TLS, and wants to see the certificate that the token stands for.
                    raise _wants_token(endpoint) from None
                # An etcd without TLS ends the connection or waits for more, and so may our own in a bad moment.
                if speaks_http(endpoint, deadline_s):
                    return False
                raise
    except OSError as error:
        raise Unavailable(f"{endpoint}: {error.strerror or error}") from error
    if secret is None:
        raise _wants_token(endpoint)
    return True


def _wants_token(endpoint: Endpoint) -> Denied:
    return Denied(
        f"the store at {endpoint} is a job's own and wants its token; type the line that elaunch printed there"
        " (ELAUNCH_TOKEN=… elaunch …), or, for an etcd that speaks TLS, --rdzv-endpoint https://…"
    )


def speaks_http(endpoint: Endpoint, deadline_s: float) -> bool:
    """Whether what listens there answers without TLS, as an etcd does. Raises OSError."""
    with _connected(endpoint, deadline_s) as plain:
        plain.sendall(f"GET /version HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\n\r\n".encode())
        return plain.recv(16).startswith(b"HTTP/")


def _connected(endpoint: Endpoint, deadline_s: float) -> socket.socket:
    # A resolver that is slow takes none of the time to connect.
    plain = dial(resolve(endpoint.host, endpoint.port, deadline_s), Deadline(deadline_s).left)
    plain.settimeout(deadline_s)
    return plain


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _FoundWatch:
    """A watch that says why it could not begin as the store's other calls do."""

    def __init__(self, ask: Callable[[Callable[[Store], None]], None], watch: Watch) -> None:
        self._ask = ask
        self._watch = watch

    def begun(self) -> None:
        self._ask(lambda _: self._watch.begun())

    def close(self) -> None:
        self._watch.close()
