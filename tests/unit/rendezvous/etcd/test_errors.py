"""rendezvous.etcd.errors: each refusal of an etcd means wait, act or end. Tests every row of both tables."""

from __future__ import annotations

import re
import ssl

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint, Login
from elaunch.rendezvous.etcd.errors import BY_CODE, Kind, cancelled, explain, kind_of
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import EtcdError, Json
from elaunch.rendezvous.store import Denied, LeaseGone, Put, Rejected, StoreError, TimedOut, Txn, Unavailable
from tests.harness import REPOSITORY

ETCD = Endpoint("etcd-a", 2379)
USER = Access(login=Login("train", "secret"))
# The exact messages of etcd 3.4 to 3.6 and gRPC, with gRPC's code, and the caller's error for each.
ANSWERS = [
    (8, "etcdserver: mvcc: database space exceeded", Rejected),
    (15, "etcdserver: corrupt cluster", Rejected),
    (8, "etcdserver: too many requests", Unavailable),
    (3, "etcdserver: request is too large", Denied),
    (8, "grpc: received message larger than max (3145841 vs. 2097152)", Denied),
    (13, "grpc: received message length 9437184 exceeding the max size 4194304", Denied),
    (11, "HTTP status 413: ''", Denied),
    (3, "etcdserver: too many operations in txn request", Denied),
    (11, "etcdserver: too large lease TTL", Denied),
    (11, "etcdserver: mvcc: required revision has been compacted", Unavailable),
    (11, "etcdserver: mvcc: required revision is a future revision", Unavailable),
    (9, "etcdserver: not leader", Unavailable),
    (9, "etcdserver: cluster has a downgrade job in progress", Unavailable),
    (9, "etcdserver: authentication is not enabled", Denied),
    (9, "etcdserver: user name not found", Denied),
    (9, "etcdserver: lease already exists", Rejected),
    (5, "etcdserver: requested lease not found", LeaseGone),
    (5, "etcdserver: member not found", Rejected),
    (3, "etcdserver: authentication failed, invalid user ID or password", Denied),
    (3, "etcdserver: duplicate key given in txn request", Denied),
    (3, "etcdserver: user name is empty", Denied),
    (3, "CommonName of client sending a request against gateway will be ignored and not used as expected", Denied),
    (3, "etcdserver: revision of auth store is old", Unavailable),
    (16, "etcdserver: invalid auth token", Unavailable),
    (16, "HTTP status 401: ''", Denied),
    (7, "etcdserver: permission denied", Denied),
    (7, "HTTP status 403: ''", Denied),
    (12, "unknown service etcdserverpb.Lease", Denied),
    (
        14,
        'connection error: desc = "transport: authentication handshake failed: remote error: bad certificate"',
        Denied,
    ),
    *(
        (14, f"etcdserver: {text}", Unavailable)
        for text in ("no leader", "leader changed", "not capable", "server stopped", "request timed out")
    ),
    (1, "context canceled", Unavailable),
    (1, "stopped", Unavailable),
    (2, "context deadline exceeded", Unavailable),
    (2, "raft: stopped", Rejected),
    (4, "context deadline exceeded", Unavailable),
    (4, "late", Unavailable),
    (6, "already there", Rejected),
    (8, "quota of something", Rejected),
    (9, "some precondition", Denied),
    (10, "aborted", Unavailable),
    (13, "internal", Rejected),
    (15, "lost", Rejected),
    (99, "an unknown code", Rejected),
]
# The agent's reaction to an error: see agent.session.session and agent.core.store_outage.
ACTIONS = {Unavailable: "wait", Rejected: "act", Denied: "end"}


@pytest.mark.parametrize(("code", "text", "error"), ANSWERS)
def test_each_error_of_etcd_means_one_of_the_store(code: int, text: str, error: type[StoreError]) -> None:
    explained = explain(EtcdError(code, text), ETCD, USER)

    assert type(explained) is error
    assert str(explained).startswith("etcd-a:2379")


def test_a_full_store_of_our_own_is_not_fixed_by_etcds_commands() -> None:
    access = Access(tls=ssl.create_default_context(), bearer="x")

    explained = explain(EtcdError(8, "etcdserver: mvcc: database space exceeded"), ETCD, access)

    assert type(explained) is Rejected
    assert "the served store is full" in str(explained)
    assert "etcdctl" not in str(explained)


def test_a_denial_names_the_user_and_the_way_out() -> None:
    access = Access(login=Login("train", "secret"), prefix="/teams/nlp/")

    explained = explain(EtcdError(7, "etcdserver: permission denied"), ETCD, access)

    assert "user 'train' may not use these keys" in str(explained)
    assert "readwrite on the prefix /teams/nlp/" in str(explained)
    assert "secret" not in str(explained)


def test_without_a_user_what_is_missing_is_the_user() -> None:
    explained = explain(EtcdError(7, "etcdserver: permission denied"), ETCD, Access())

    assert isinstance(explained, Denied)
    assert "none is given" in str(explained)


class Members:
    """A transport whose members answer each in its way."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = {f"h{number}": error for number, error in enumerate(errors)}
        self.requested: list[str] = []

    def call(self, endpoint: Endpoint, *_: object) -> Json:
        self.requested.append(endpoint.host)
        raise self.errors[endpoint.host]

    def close(self) -> None: ...


def refusal(*errors: Exception) -> tuple[StoreError, list[str]]:
    transport = Members(*errors)
    store = EtcdStore([Endpoint(host, 2379) for host in transport.errors], transport=transport)  # type: ignore[arg-type]
    with pytest.raises(StoreError) as raised:
        store.commit(Txn((), (Put("/x", "y"),)))
    return raised.value, transport.requested


FULL = EtcdError(8, "etcdserver: mvcc: database space exceeded")
AWAY = Unavailable("h2:2379 refuses connections: nothing listens there")
DENIED = EtcdError(12, "unknown method")


def late(host: str) -> TimedOut:
    return TimedOut(f"no answer from {host}:2379 within 0.5 s")


def test_a_cluster_of_which_all_members_are_slow_is_slow() -> None:
    error, _ = refusal(late("h0"), late("h1"), late("h2"))

    assert type(error) is TimedOut
    assert str(error) == "; ".join(f"no answer from h{number}:2379 within 0.5 s" for number in range(3))


def test_a_full_cluster_with_a_member_down_refuses_with_one_reason() -> None:
    error, requested = refusal(FULL, FULL, AWAY)

    assert type(error) is Rejected
    assert str(error).startswith("h0:2379, h1:2379: etcd is full (alarm NOSPACE)")
    assert str(error).endswith("; h2:2379 refuses connections: nothing listens there")
    assert requested == ["h0", "h1", "h2"]


def test_a_denial_is_final_only_where_every_member_denies() -> None:
    assert type(refusal(DENIED, DENIED, DENIED)[0]) is Denied
    assert type(refusal(DENIED, AWAY, DENIED)[0]) is Rejected


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("rpc error: code = Unauthenticated desc = etcdserver: invalid auth token", Kind.LOGIN),
        ("rpc error: code = PermissionDenied desc = etcdserver: permission denied", Kind.DENY),
        ("etcdserver: permission denied", Kind.DENY),
        ("rpc error: code = InvalidArgument desc = watch", Kind.DENY),
        ("etcdserver: no leader", Kind.WAIT),
        ("", Kind.WAIT),
    ],
)
def test_why_a_watch_was_ended_is_judged_alike(reason: str, kind: Kind) -> None:
    assert kind_of(cancelled(reason)) is kind


def test_the_operators_page_shows_every_code() -> None:
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    section = page.partition("## Errors of the store")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (wait|act|end) \| (.+) \|$", section, re.MULTILINE)
    lists = [(action, re.match(r"\d+(, \d+)*", item)) for action, row in rows for item in row.split("; ")]
    shown = {int(code): action for action, codes in lists if codes for code in codes[0].split(", ")}

    assert shown == {code: ACTIONS[type(explain(EtcdError(code, "a text"), ETCD, Access()))] for code in BY_CODE}
