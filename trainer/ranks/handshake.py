"""How two ranks prove to each other that they belong to the same channel, and the socket at which one listens.

Each rank listens with a secret of its own, and puts it with its address into the process group's store. To a connection
it sends a random challenge. The rank that has connected responds with a number of its own and a proof that it knows the
secret, and gets a proof in turn. Both proofs have both numbers in them, so messages that somebody has seen on the way
are of no use a second time.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace

CHALLENGE_BYTES = 16
PROOF_BYTES = 32
_SECRET_BYTES = 32
_RESPONSE = struct.Struct(f"<I{CHALLENGE_BYTES}s{PROOF_BYTES}s")
RESPONSE_BYTES = _RESPONSE.size

# A rank responds immediately. A connection without a response by then is no rank's, or its host hangs. A rank that
# connects waits as long for the challenge, then tries again: the other one may be busy, or listen elsewhere by now.
_ANSWER_S = 5.0
# Connections that have not responded yet; of more than these the oldest is closed.
_UNKNOWN_MAX = 64
# The kernel holds connections until this rank polls. All ranks that may connect have a place, and some strangers.
_BACKLOG_MAX = 1024
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# A host that is gone answers no probe, and is noticed after 30 s while nothing is on its way to it. Without an agent
# nobody else notices; an agent's lease ends long before.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


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
        secret, place = content[:_SECRET_BYTES], content[_SECRET_BYTES:].decode()
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
    """Connect as rank `sender`. Raises OSError, also if nobody answers for 5 s: that rank may be busy.

    This waits for so long at most, in which deaths of other ranks go unnoticed.
    """
    try:
        made = socket.create_connection((contact.address, contact.port), _ANSWER_S)
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
    """The socket, which does not block from now on, sends at once, and notices that the other host is gone."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


@dataclass(eq=False)
class _Guest:
    """A connection that is not proved to be a rank's."""

    socket: socket.socket
    challenge: bytes
    until_s: float
    received: bytes = b""


class RankListener:
    """Listens at `address` for the ranks of `channel` that are higher than `rank`. `contact` is how they find it.

    It has no thread: call `admit` when one of `descriptors` can be read, and at `until_s`.
    """

    def __init__(self, channel: str, rank: int, world_size: int, address: str) -> None:
        self._missing = set(range(rank + 1, world_size))
        contact = Contact(channel, rank, address, 0, secrets.token_bytes(_SECRET_BYTES))
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._socket.setblocking(False)
            self._socket.bind((address, 0))
            # For each the kernel keeps what a stranger sends, 128 kB or so.
            self._socket.listen(min(len(self._missing) + _UNKNOWN_MAX, _BACKLOG_MAX))
        except OSError as error:
            self._socket.close()
            why = f"this rank cannot listen at {address} ({error.strerror}), so the other ranks cannot reach it"
            raise OSError(f"{why}; GLOO_SOCKET_IFNAME=… names the interface to use") from error
        self.contact = replace(contact, port=self._socket.getsockname()[1])
        # The oldest first.
        self._guests: list[_Guest] = []

    @property
    def is_complete(self) -> bool:
        """Whether all ranks that may connect have done so."""
        return not self._missing

    @property
    def descriptors(self) -> list[int]:
        return [self._socket.fileno(), *(guest.socket.fileno() for guest in self._guests)]

    @property
    def until_s(self) -> float:
        """When the next connection without a response is to be closed."""
        return min((guest.until_s for guest in self._guests), default=math.inf)

    def admit(self, readable: Container[int]) -> dict[int, socket.socket]:
        """Accept connections, close those of strangers, and return those of ranks. Raises OSError if none has room."""
        if self._socket.fileno() in readable:
            self._accept()
        now_s, found = time.monotonic(), dict[int, socket.socket]()
        for guest in [*self._guests]:
            try:
                rank = self._authenticated(guest)
            except BlockingIOError:
                if now_s >= guest.until_s:
                    self._turn_away(guest)
            except OSError:
                self._turn_away(guest)
            else:
                self._missing.discard(rank)
                self._guests.remove(guest)
                found[rank] = guest.socket
        return found

    def close(self) -> None:
        self._socket.close()
        for guest in [*self._guests]:
            self._turn_away(guest)

    def _accept(self) -> None:
        """Accept some connections. If there is no room for more, the oldest that has not responded goes."""
        for _ in range(_UNKNOWN_MAX // 4):
            try:
                taken, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    if not self._guests:
                        # The rank that connects would wait for its answer, and this one would look again and again.
                        raise
                    self._turn_away(self._guests[0])
                # Otherwise there is no more, or this one was given up.
                return
            guest = _Guest(_tuned(taken), secrets.token_bytes(CHALLENGE_BYTES), time.monotonic() + _ANSWER_S)
            self._guests.append(guest)
            try:
                taken.send(guest.challenge)
            except OSError:
                self._turn_away(guest)
            if len(self._guests) > _UNKNOWN_MAX:
                self._turn_away(self._guests[0])

    def _authenticated(self, guest: _Guest) -> int:
        """The rank that has connected, which gets its proof. Raises BlockingIOError until it has responded.

        Raises ConnectionError for a stranger, and OSError if the connection fails.
        """
        while missing := RESPONSE_BYTES - len(guest.received):
            if not (received := guest.socket.recv(missing)):
                raise ConnectionResetError
            guest.received += received
        rank, proof = self.contact.confirmation(guest.challenge, guest.received) or (-1, b"")
        if rank not in self._missing or guest.socket.send(proof) < PROOF_BYTES:
            raise ConnectionRefusedError
        return rank

    def _turn_away(self, guest: _Guest) -> None:
        guest.socket.close()
        self._guests.remove(guest)
