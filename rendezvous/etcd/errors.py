"""How a client reacts to an error of etcd, and the sentence for the user.

The tables below are the whole rule. docs/operations.md shows them to users, and a test covers every row.
Codes are gRPC's; texts are those of etcd 3.4 to 3.6 (its `rpctypes/error.go`).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd.transport import EtcdError
from elaunch.rendezvous.store import Denied, HistoryLost, LeaseGone, Rejected, StoreError, Unavailable

CANCELLED, UNKNOWN, INVALID, DEADLINE, NOT_FOUND, EXISTS, PERMISSION, EXHAUSTED = range(1, 9)
PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = range(9, 17)


class Kind(Enum):
    """What to do about an error."""

    WAIT = auto()  # The error is transient: retry, also on other members.
    REPORT = auto()  # Retry, and report it to the user immediately, who may have to act.
    DENY = auto()  # Waiting does not help. An agent that has not joined the job yet ends; others treat it as REPORT.
    LOGIN = auto()  # The token has expired: request another one.
    LEASE_GONE = auto()
    LEASE_EXISTS = auto()


class Rule(NamedTuple):
    """What to do about the errors of one row of the tables below; `sentence` is for the user."""

    kind: Kind
    sentence: str = ""


_GRPC = "pip install 'elaunch[etcd3]' and use --rdzv-conf transport=grpc"
_OWN_SERVER = (
    "etcd's JSON gateway cannot reach its own server, which requires client certificates: put clientAuth beside "
    f"serverAuth into the extended key usage of the server's certificate, or {_GRPC}"
)
_FULL = "database space exceeded"
_OURS_IS_FULL = (
    "the served store is full and takes no writes: it holds 256 MiB at most, and something that has the token fills it;"
    " end that, and delete its keys"
)
_TOO_LARGE = Rule(
    Kind.DENY,
    "this etcd, or its proxy, takes smaller requests than elaunch needs: start etcd with"
    " --max-request-bytes=1572864 or more",
)
# By etcd's own text, which is more specific than the code. The first row whose key is in the text decides.
BY_TEXT: dict[str, Rule] = {
    "requested lease not found": Rule(Kind.LEASE_GONE),
    "lease already exists": Rule(Kind.LEASE_EXISTS, "the lease already exists"),
    _FULL: Rule(
        Kind.REPORT,
        "etcd is full (alarm NOSPACE) and takes no writes: compact its history (etcdctl compact REVISION, the newest of"
        " etcdctl endpoint status -w json), delete keys that are not needed, defragment every member (etcdctl defrag"
        " --cluster), and disarm the alarm (etcdctl alarm disarm); or raise --quota-backend-bytes",
    ),
    "corrupt cluster": Rule(
        Kind.REPORT,
        "etcd's members hold different data (alarm CORRUPT) and take no requests: replace the member that is wrong, and"
        " disarm the alarm (etcdctl alarm disarm)",
    ),
    "too many requests": Rule(Kind.WAIT),
    "request is too large": _TOO_LARGE,
    "larger than max": _TOO_LARGE,
    "exceeding the max size": _TOO_LARGE,
    "too many operations": Rule(
        Kind.DENY,
        "this etcd takes fewer operations at once than elaunch needs: start it with --max-txn-ops=128 or more",
    ),
    "too large lease TTL": Rule(Kind.DENY, "this etcd refuses so long a lease; lower --rdzv-conf keys_ttl=SECONDS"),
    "mvcc: required revision": Rule(Kind.WAIT),
    "CommonName": Rule(
        Kind.DENY,
        "authentication is on and the client's certificate carries a common name, which etcd's JSON gateway refuses;"
        f" use a certificate without one, or {_GRPC}",
    ),
    "bad certificate": Rule(Kind.DENY, _OWN_SERVER),
    "authentication failed": Rule(Kind.DENY, "the password of user {user} is wrong, or there is no such user"),
    "authentication is not enabled": Rule(
        Kind.DENY, "user {user} is given, but this store has no users; leave the user out"
    ),
    "permission denied": Rule(
        Kind.DENY,
        "user {user} may not use these keys; grant it readwrite on the prefix {prefix}, or name a prefix that it may"
        " use, by --rdzv-conf etcd_prefix=…",
    ),
    "user name is empty": Rule(Kind.DENY, "etcd does not know this client"),
    "invalid auth token": Rule(
        Kind.LOGIN, "the store requires another token; is ELAUNCH_TOKEN that of the elaunch that runs there?"
    ),
    "revision of auth store is old": Rule(Kind.LOGIN, "etcd's users have changed"),
    "not leader": Rule(Kind.WAIT),
    # The text, with the code UNKNOWN, of an etcd without a leader for a lease request.
    "context deadline exceeded": Rule(Kind.WAIT),
    "context canceled": Rule(Kind.WAIT),
    "downgrade job in progress": Rule(Kind.WAIT),
}
# For errors whose text is in no row of BY_TEXT.
BY_CODE: dict[int, Rule] = {
    CANCELLED: Rule(Kind.WAIT),
    UNKNOWN: Rule(Kind.REPORT, "etcd reports an error of its own"),
    INVALID: Rule(Kind.DENY, "etcd rejects the request as invalid"),
    DEADLINE: Rule(Kind.WAIT),
    NOT_FOUND: Rule(Kind.REPORT, "etcd does not find what was requested"),
    EXISTS: Rule(Kind.REPORT, "etcd has that already"),
    PERMISSION: Rule(Kind.DENY, "this user may not do that"),
    EXHAUSTED: Rule(Kind.REPORT, "etcd has run out of a resource"),
    PRECONDITION: Rule(Kind.DENY, "etcd refuses"),
    ABORTED: Rule(Kind.WAIT),
    OUT_OF_RANGE: _TOO_LARGE,
    UNIMPLEMENTED: Rule(Kind.DENY, "this etcd does not know the request"),
    INTERNAL: Rule(Kind.REPORT, "etcd has an internal error"),
    UNAVAILABLE: Rule(Kind.WAIT),
    DATA_LOSS: Rule(Kind.REPORT, "etcd has lost data"),
    UNAUTHENTICATED: Rule(Kind.DENY, "etcd does not know this client"),
}
_OTHER = Rule(Kind.REPORT, "etcd refuses")
# A request without a user through the gateway may count as the user of the gateway's own certificate.
_NO_USER = ("user name is empty", "permission denied")


def kind_of(error: EtcdError) -> Kind:
    return _rule(error).kind


def explain(error: EtcdError, endpoint: Endpoint, access: Access) -> StoreError:
    """The error for the caller, as a sentence."""
    kind, sentence = _rule(error)
    user = access.login.user if access.login else ""
    match kind:
        case Kind.LEASE_GONE:
            return LeaseGone(f"{endpoint}: the lease has ended")
        case Kind.REPORT | Kind.LEASE_EXISTS:
            # Only the store that elaunch serves gets a bearer, and that store has no alarm.
            is_ours = bool(access.bearer) and sentence == BY_TEXT[_FULL].sentence
            return Rejected(f"{endpoint}: {_OURS_IS_FULL if is_ours else sentence}")
        # A LOGIN with a user: even a new token was refused, because this member does not know it yet.
        case Kind.WAIT | Kind.LOGIN if kind is Kind.WAIT or user:
            # A text that is not etcd's own is about the gateway's connection to its server. etcd 3.5 has "bad
            # certificate", 3.4 other texts.
            is_gateways = access.tls and not error.text.startswith("etcdserver:")
            hint = f"; if this persists: {_OWN_SERVER}" if is_gateways else ""
            return Unavailable(f"{endpoint} answers: {error.text}{hint}")
    if not user and any(text in error.text for text in _NO_USER):
        return Denied(f"{endpoint}: the store requires a user and a password, and none is given")
    return Denied(f"{endpoint}: {sentence.replace('{user}', repr(user)).replace('{prefix}', access.prefix)}")


def cancelled(reason: str) -> EtcdError:
    """The error for which the server cancelled a watch. etcd 3.4 and 3.5 write a gRPC code's name into `reason`."""
    text = reason.rpartition(" desc = ")[2]
    codes = {"Unauthenticated": UNAUTHENTICATED, "permission denied": PERMISSION, "InvalidArgument": INVALID}
    code = next((code for name, code in codes.items() if name in reason), UNAVAILABLE)
    return EtcdError(code, text or "the watch was ended")


def history_lost(endpoint: Endpoint, access: Access, was: str, now: str) -> HistoryLost:
    """The error for a store behind `endpoint` that is no longer the same store."""
    if access.bearer:
        return HistoryLost(
            f"the job's store on {endpoint.host} was restarted and has lost this job;"
            " start elaunch here again to join the new one"
        )
    return HistoryLost(
        f"{endpoint}: the store has lost its history ({was} before, {now} now); it was wiped, restored from a backup, "
        "or is another cluster"
    )


def _rule(error: EtcdError) -> Rule:
    if by_text := next((rule for text, rule in BY_TEXT.items() if text in error.text), None):
        return by_text
    kind, sentence = BY_CODE.get(error.code, _OTHER)
    return Rule(kind, f"{sentence}: {error.text}")
