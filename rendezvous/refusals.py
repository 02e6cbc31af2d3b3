"""What an etcd's error means to a client: who has to act, in words."""

from __future__ import annotations

from enum import Enum, auto

from elaunch.rendezvous.access import Access
from elaunch.rendezvous.carrier import Refused
from elaunch.rendezvous.plan import Endpoint
from elaunch.rendezvous.store import Denied, HistoryLost, LeaseGone, StoreError, Unavailable

UNKNOWN, INVALID, DEADLINE, NOT_FOUND, PERMISSION, EXHAUSTED = 2, 3, 4, 5, 7, 8
PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 9, 10, 11, 12, 13, 14, 16

_DENIALS = {
    INVALID: "etcd takes the request for a wrong one",
    PERMISSION: "this user may not do that",
    PRECONDITION: "etcd refuses",
    UNIMPLEMENTED: "this etcd does not know the request",
    UNAUTHENTICATED: "etcd does not know this client",
}
_GRPC = "pip install 'elaunch[etcd3]' and use --rdzv-conf transport=grpc"
_OWN_SERVER = (
    "etcd's JSON gateway cannot reach its own server, which asks for client certificates: put clientAuth beside "
    f"serverAuth into the extended key usage of the server's certificate, or {_GRPC}"
)
# By etcd's own text, which says more than the code.
_WORDS = (
    (
        "CommonName",
        "users are on and the client's certificate carries a common name, which etcd's JSON gateway refuses; use a "
        f"certificate without one, or {_GRPC}",
    ),
    ("bad certificate", _OWN_SERVER),
    ("authentication failed", "the password of user {user!r} is wrong, or there is no such user"),
    ("authentication is not enabled", "user {user!r} is given, but this store has no users; leave the user out"),
    ("permission denied", "user {user!r} may not use these keys; grant it readwrite on the prefix /elaunch/"),
    (
        "invalid auth token",
        "the store asks for another token; is ELAUNCH_TOKEN that of the elaunch that runs there?",
    ),
)
# Through the gateway, who sends no user may pass for the gateway's own certificate.
_NO_USER = ("user name is empty", "permission denied")


class Kind(Enum):
    """What to do about an error."""

    RETRY = auto()
    LOGIN = auto()
    LEASE_GONE = auto()
    LEASE_THERE = auto()
    DENIED = auto()


def judge(error: Refused) -> Kind:
    """What kind of error it is; codes are gRPC's, texts etcd's of 3.4 to 3.6."""
    text = error.text
    if "requested lease not found" in text:
        return Kind.LEASE_GONE
    if "lease already exists" in text:
        return Kind.LEASE_THERE
    if "invalid auth token" in text or "revision of auth store is old" in text:
        return Kind.LOGIN
    if "user name is empty" in text or any(words in text for words, _ in _WORDS):
        return Kind.DENIED
    return Kind.DENIED if error.code in _DENIALS else Kind.RETRY


def explain(error: Refused, endpoint: Endpoint, access: Access) -> StoreError:
    """The error for the caller, as a sentence."""
    kind = judge(error)
    user = access.login.user if access.login else ""
    if kind is Kind.LEASE_GONE:
        return LeaseGone(f"{endpoint}: the lease has ended")
    # With a user, a new token was refused: this member has not heard of it yet.
    if kind is Kind.RETRY or (kind is Kind.LOGIN and user):
        # What is not etcd's own text is about the gateway's connection: 3.5 says "bad certificate", 3.4 this or that.
        is_gateways = access.tls and not error.text.startswith("etcdserver:")
        hint = f"; if it goes on: {_OWN_SERVER}" if is_gateways else ""
        return Unavailable(f"{endpoint} answers: {error.text}{hint}")
    if not user and any(words in error.text for words in _NO_USER):
        return Denied(f"{endpoint}: the store asks for a user and a password, and none is given")
    for words, sentence in _WORDS:
        if words in error.text:
            return Denied(f"{endpoint}: {sentence.format(user=user)}")
    return Denied(f"{endpoint}: {_DENIALS.get(error.code, 'etcd refuses')}: {error.text}")


def cancelled(reason: str) -> Refused:
    """Why a watch was ended by the server: 3.4 and 3.5 wrap gRPC's code in words."""
    if "Unauthenticated" in reason:
        return Refused(UNAUTHENTICATED, reason)
    if "permission denied" in reason:
        return Refused(PERMISSION, reason)
    if "InvalidArgument" in reason:
        return Refused(INVALID, reason)
    return Refused(UNAVAILABLE, reason or "the watch was ended")


def history_lost(endpoint: Endpoint, was: str, now: str) -> HistoryLost:
    """The store behind `endpoint` is not the one that it was."""
    return HistoryLost(
        f"{endpoint}: the store has lost its history ({was} before, {now} now); it was wiped, restored from a backup, "
        "or is another cluster"
    )
