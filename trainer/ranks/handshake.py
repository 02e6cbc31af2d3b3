"""How the ranks of a channel find each other by the process group's store, and prove that they belong to the channel.

Each rank listens with a secret of its own, and puts it with its address into that store. To a connection it sends a
random challenge. The rank that has connected responds with a number of its own and a proof that it knows the secret,
and gets a proof in turn. Both proofs have both numbers in them, so a recorded message is of no use a second time.
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
# connects waits as long for the challenge, then tries again: the other one may be busy, or listen elsewhere by now.
RESPONSE_S = 5.0
# Connections that have not responded yet; of more than these the oldest is closed.
PENDING_MAX = 64
# The kernel holds connections until this rank polls. All ranks that may connect have a place, and some others.
_BACKLOG_MAX = 1024
# A host that is gone responds to no probe, and is noticed after 30 s while nothing is on its way to it. That counts
# without an agent; an agent's lease ends long before.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_INTERFACE = "GLOO_SOCKET_IFNAME"
# Addresses for documentation (RFC 5737, RFC 3849): the route to them is the one to everywhere. Nothing is sent.
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
        """Without channel and rank, which are in the key."""
        return self.secret + f"{self.port} {self.address}".encode()

    @classmethod
    def from_bytes(cls, channel: str, rank: int, content: bytes) -> Contact:
        secret, place = content[:SECRET_BYTES], content[SECRET_BYTES:].decode()
        port, _, address = place.partition(" ")
        return cls(channel, rank, address, int(port), secret)

    def response(self, sender: int, challenge: bytes, number: bytes) -> bytes:
        """What rank `sender` sends to this rank after its challenge; `number` is random."""
        return _RESPONSE.pack(sender, number, self._proof("response", sender, challenge + number))

    def confirmation(self, challenge: bytes, response: bytes) -> tuple[int, bytes] | None:
        """The rank that has sent this response, and this rank's proof for it; None if it is no rank's."""
        sender, number, proof = _RESPONSE.unpack(response)
        if not hmac.compare_digest(proof, self._proof("response", sender, challenge + number)):
            return None
        return sender, self._proof("confirmed", sender, challenge + number)

    def _proof(self, purpose: str, sender: int, numbers: bytes) -> bytes:
        content = f"{purpose} {self.channel} {sender} {self.rank} ".encode() + numbers
        return hmac.digest(self.secret, content, "sha256")


def dial(contact: Contact, sender: int) -> socket.socket:
    """Connect as rank `sender`. Raises OSError, also without a response for 5 s: that rank may be busy.

    This waits for so long at most, in which deaths of other ranks go unnoticed.
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
    """The socket, which does not block from now on, sends immediately, and notices that the other host is gone."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def listen(address: str, ranks: int) -> socket.socket:
    """A socket at which so many ranks may connect. Raises OSError with the way out."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setblocking(False)
        made.bind((address, 0))
        # For each the kernel keeps what an unauthenticated peer sends, 128 kB or so.
        made.listen(min(ranks + PENDING_MAX, _BACKLOG_MAX))
    except OSError as error:
        made.close()
        why = f"this rank cannot listen at {address} ({error.strerror}), so the other ranks cannot reach it"
        raise OSError(f"{why}; {_INTERFACE}=… names the interface to use") from error
    return made


class PendingPeer:
    """A connection that is not proved to be a rank's. It gets a challenge, and is to be closed at `until_s`."""

    def __init__(self, taken: socket.socket) -> None:
        self.socket, self.until_s = _tuned(taken), time.monotonic() + RESPONSE_S
        self._challenge, self._received = secrets.token_bytes(CHALLENGE_BYTES), b""
        # If that fails, so does what follows.
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
    """Where the ranks of a channel listen, in the store by which the job's process group was made.

    torchrun's agent keeps all keys at a restart, and nothing that it gives its workers names one. So a contact may be
    that of the process that was this rank before.

    Every process that reaches MASTER_PORT can read that store. So under elaunch it holds no secret as it is: the agents
    have given one to all ranks of the generation.
    """

    channel: str

    def own_address(self) -> str:
        """The address at which the others reach this process. Raises OSError."""
        return own_address(os.environ)

    def publish(self, rank: int, content: bytes) -> None:
        """Write the contact of this rank, in place of an older one."""
        key = f"{self.channel}/{rank}"
        _store().set(key, _masked(key, content))

    def find(self, rank: int) -> bytes | None:
        """The newest contact of this rank; None if there is none yet. Does not wait; may raise RuntimeError."""
        # Not `wait` with a limit: torch prints two warnings whenever its time is over.
        key = f"{self.channel}/{rank}"
        return _masked(key, bytes(_store().get(key))) if _store().check([key]) else None


def _masked(key: str, contact: bytes) -> bytes:
    """The contact with its secret, which comes first, masked by a pad for this key; masking it again reveals it."""
    given = os.environ.get("ELAUNCH_GENERATION_SECRET", "")
    pad = hmac.digest(given.encode(), key.encode(), "sha256") if given else b""
    return bytes(map(operator.xor, contact, pad)) + contact[len(pad) :]


def _store() -> Any:
    # torch has no public name for it; this one has been in every release since 1.8.
    return dist.distributed_c10d._get_default_store()


def own_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names, else the one by which it reaches MASTER_ADDR.

    On the first node a name in MASTER_ADDR may mean a loopback address (127.0.1.1 in Debian's /etc/hosts). Ranks on
    other nodes cannot use that, so it is the address by which this host reaches other networks. Without MASTER_ADDR
    the host's own name is taken in its place. Raises OSError for an interface without an address, and for a
    MASTER_ADDR that is unknown.
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
                f"this host finds no way to {master} ({error.strerror}), so the other ranks cannot reach this one; "
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
    """Whether this means the loopback on every host; another name may mean it on its own host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _towards(host: str) -> str:
    """The address that packets to `host` come from. None is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _of_interface(name: str) -> str:
    # Few jobs name one.
    import psutil

    found = psutil.net_if_addrs().get(name, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in found:
            if each.family == family and not each.address.startswith("fe80:"):
                return str(each.address)
    raise OSError(f"{_INTERFACE} is {name}, and this host has no address on an interface of that name")
