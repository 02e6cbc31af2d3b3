"""Discovery and mutual authentication of the ranks of a channel, by the process group's store.

Each rank listens, and puts its address and a secret of its own into that store. It sends each connection a random
challenge. The connecting rank responds with a nonce and an HMAC that proves the secret, and gets such a proof in turn.
Both proofs cover the challenge and the nonce, so neither can be replayed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import operator
import os
import secrets
import socket
import struct
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

CHALLENGE_BYTES = 16
PROOF_BYTES = 32
SECRET_BYTES = 32
_RESPONSE = struct.Struct(f"<I{CHALLENGE_BYTES}s{PROOF_BYTES}s")
RESPONSE_BYTES = _RESPONSE.size

# A rank responds immediately. A connection without a response by then is no rank's, or its host hangs. A rank that
# connects waits as long for the challenge, then retries: the other one may be busy, or listen elsewhere by now.
RESPONSE_S = 5.0
# The most connections that have not responded yet; beyond these the oldest is closed.
PENDING_MAX = 64
# The kernel queues connections until this rank polls: those of all ranks that may connect, and some others.
_BACKLOG_MAX = 1024
# Keepalive detects a lost host after 30 s on an idle connection; an agent's lease expires long before.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_INTERFACE = "GLOO_SOCKET_IFNAME"
# Addresses for documentation (RFC 5737, RFC 3849): the route to them is the default route. Nothing is sent.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True)
class Contact:
    """Where rank `rank` listens for the ranks of `channel`, and its secret."""

    channel: str
    rank: int
    address: str
    port: int
    secret: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """Secret, port and address; the key has the rest."""
        return self.secret + f"{self.port} {self.address}".encode()

    @classmethod
    def from_bytes(cls, channel: str, rank: int, content: bytes) -> Contact:
        secret, place = content[:SECRET_BYTES], content[SECRET_BYTES:].decode()
        port, _, address = place.partition(" ")
        return cls(channel, rank, address, int(port), secret)

    def response(self, sender: int, challenge: bytes, number: bytes) -> bytes:
        """The response of rank `sender` to this rank's challenge; `number` is a nonce."""
        return _RESPONSE.pack(sender, number, self._proof("response", sender, challenge + number))

    def confirmation(self, challenge: bytes, response: bytes) -> tuple[int, bytes] | None:
        """The rank that sent this response, and this rank's proof for it; None if it is not authentic."""
        sender, number, proof = _RESPONSE.unpack(response)
        if not hmac.compare_digest(proof, self._proof("response", sender, challenge + number)):
            return None
        return sender, self._proof("confirmed", sender, challenge + number)

    def _proof(self, purpose: str, sender: int, numbers: bytes) -> bytes:
        content = f"{purpose} {self.channel} {sender} {self.rank} ".encode() + numbers
        return hmac.digest(self.secret, content, "sha256")


def dial(contact: Contact, sender: int) -> socket.socket:
    """Connect as rank `sender`. Raises OSError, also if that rank is too busy to respond.

    Each wait takes 5 s at most, during which deaths of other ranks go unnoticed.
    """
    try:
        made = socket.create_connection((contact.address, contact.port), RESPONSE_S)
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
    try:
        challenge = _received(made, CHALLENGE_BYTES)
        response = contact.response(sender, challenge, secrets.token_bytes(CHALLENGE_BYTES))
        made.sendall(response)
        _, proof = contact.confirmation(challenge, response) or (sender, b"")
        if not hmac.compare_digest(_received(made, PROOF_BYTES), proof):
            raise ConnectionRefusedError(f"the process there is not rank {contact.rank} any more")
        return _tuned(made)
    except BaseException:
        made.close()
        raise


def _received(source: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (part := source.recv(size - len(content))):
            raise ConnectionResetError("the connection was closed before its reply")
        content += part
    return content


def _tuned(made: socket.socket) -> socket.socket:
    """The socket, made non-blocking, with TCP_NODELAY and keepalive."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def listen(address: str, ranks: int) -> socket.socket:
    """A listening socket for so many ranks. Raises OSError with the way out."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setblocking(False)
        made.bind((address, 0))
        # The kernel buffers what each unauthenticated peer sends, about 128 kB.
        made.listen(min(ranks + PENDING_MAX, _BACKLOG_MAX))
    except OSError as error:
        made.close()
        why = f"this rank cannot listen at {address} ({error.strerror}), so the other ranks cannot reach it"
        raise OSError(f"{why}; {_INTERFACE}=… names the interface to use") from error
    return made


class PendingPeer:
    """A connection that is not authenticated yet. It gets a challenge, and is to be closed at `until_s`."""

    def __init__(self, taken: socket.socket) -> None:
        self.socket, self.until_s = _tuned(taken), time.monotonic() + RESPONSE_S
        self._challenge, self._received = secrets.token_bytes(CHALLENGE_BYTES), b""
        # If that fails, so does the next read.
        with contextlib.suppress(OSError):
            taken.send(self._challenge)

    def admitted(self, contact: Contact, ranks: Container[int]) -> int:
        """Which of `ranks` has connected; it gets its proof. Raises BlockingIOError until it has responded.

        Raises ConnectionError for an unauthenticated peer, and OSError if the connection fails.
        """
        while missing := RESPONSE_BYTES - len(self._received):
            if not (received := self.socket.recv(missing)):
                raise ConnectionResetError
            self._received += received
        rank, proof = contact.confirmation(self._challenge, self._received) or (-1, b"")
        if rank not in ranks or self.socket.send(proof) < PROOF_BYTES:
            raise ConnectionRefusedError
        return rank


@dataclass(frozen=True)
class StoreContacts:
    """The contacts of a channel's ranks, in the store of the job's process group.

    torchrun's agent keeps all keys at a restart, and gives its workers nothing that identifies it. So a contact may be
    that of this rank's previous process.

    Every process that reaches MASTER_PORT can read that store. So under elaunch the secrets in it are masked with one
    that the agents have given to all ranks of the generation.
    """

    channel: str

    def own_address(self) -> str:
        """The address at which the others reach this process. Raises OSError."""
        return own_address(os.environ)

    def publish(self, rank: int, content: bytes) -> None:
        """Write the contact of this rank, replacing an older one."""
        key = f"{self.channel}/{rank}"
        _store().set(key, _masked(key, content))

    def find(self, rank: int) -> bytes | None:
        """The newest contact of this rank; None if there is none yet. Does not wait; may raise RuntimeError."""
        # Not `wait` with a timeout: torch prints two warnings whenever it expires.
        key = f"{self.channel}/{rank}"
        return _masked(key, bytes(_store().get(key))) if _store().check([key]) else None


def _masked(key: str, contact: bytes) -> bytes:
    """The contact with its secret, which comes first, XORed with a pad for this key; a second call unmasks it."""
    given = os.environ.get("ELAUNCH_GENERATION_SECRET", "")
    pad = hmac.digest(given.encode(), key.encode(), "sha256") if given else b""
    return bytes(map(operator.xor, contact, pad)) + contact[len(pad) :]


def _store() -> Any:
    # torch has no public name for it; this one has been in every release since 1.8.
    return dist.distributed_c10d._get_default_store()


def own_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names, else this host's on the route to MASTER_ADDR.

    On the first node MASTER_ADDR may resolve to a loopback address (127.0.1.1 in Debian's /etc/hosts), which other
    nodes cannot reach. Then it is this host's address on the default route. Without MASTER_ADDR the host's own name
    takes its place. Raises OSError for an interface without an address, and for a MASTER_ADDR that this host cannot
    reach.
    """
    if names := environ.get(_INTERFACE, ""):
        # gloo takes several, separated by commas.
        return _of_interface(names.split(",")[0])
    master = environ.get("MASTER_ADDR", "")
    try:
        found = _towards(master or socket.gethostname())
    except OSError as error:
        if master:
            raise OSError(
                f"this host cannot reach {master} ({error.strerror}), so the other ranks cannot reach this one; "
                f"{_INTERFACE}=… names the interface to use"
            ) from error
        found = "127.0.0.1"
    here = environ.get("LOCAL_WORLD_SIZE", "")
    is_alone = bool(here) and here == environ.get("WORLD_SIZE", "")
    if _is_loopback(found) and not _is_loopback(master) and not is_alone:
        for somewhere in _ANYWHERE:
            with contextlib.suppress(OSError):
                return _towards(somewhere)
    return found


def _is_loopback(host: str) -> bool:
    """Whether this is the loopback on every host; another name may be so on its own host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _towards(host: str) -> str:
    """The source address of packets to `host`. None is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _of_interface(name: str) -> str:
    # Few jobs name an interface.
    import psutil

    found = psutil.net_if_addrs().get(name, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in found:
            if each.family == family and not each.address.startswith("fe80:"):
                return str(each.address)
    raise OSError(f"{_INTERFACE} is {name}, and this host has no address on an interface of that name")
