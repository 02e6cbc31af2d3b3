"""How two ranks prove to each other that they belong to the same channel, and the socket at which one listens.

Each rank listens with a secret of its own, and puts it with its address into the process group's store. To a connection
it sends a random challenge. The rank that has connected responds with a number of its own and a proof that it knows the
secret, and gets a proof in turn. Both proofs have both numbers in them, so messages that somebody has seen on the way
are of no use a second time.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Container
from dataclasses import dataclass, field

CHALLENGE_BYTES = 16
PROOF_BYTES = 32
SECRET_BYTES = 32
_RESPONSE = struct.Struct(f"<I{CHALLENGE_BYTES}s{PROOF_BYTES}s")
RESPONSE_BYTES = _RESPONSE.size

# A rank responds immediately. A connection without a response by then is no rank's, or its host hangs. A rank that
# connects waits as long for the challenge, then tries again: the other one may be busy, or listen elsewhere by now.
ANSWER_S = 5.0
# Connections that have not responded yet; of more than these the oldest is closed.
UNKNOWN_MAX = 64
# The kernel holds connections until this rank polls. All ranks that may connect have a place, and some strangers.
_BACKLOG_MAX = 1024
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
    """Connect as rank `sender`. Raises OSError, also if nobody answers for 5 s: that rank may be busy.

    This waits for so long at most, in which deaths of other ranks go unnoticed.
    """
    try:
        made = socket.create_connection((contact.address, contact.port), ANSWER_S)
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


def listen(address: str, ranks: int) -> socket.socket:
    """A socket at which so many ranks may connect. Raises OSError with the way out."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setblocking(False)
        made.bind((address, 0))
        # For each the kernel keeps what a stranger sends, 128 kB or so.
        made.listen(min(ranks + UNKNOWN_MAX, _BACKLOG_MAX))
    except OSError as error:
        made.close()
        why = f"this rank cannot listen at {address} ({error.strerror}), so the other ranks cannot reach it"
        raise OSError(f"{why}; GLOO_SOCKET_IFNAME=… names the interface to use") from error
    return made


class Guest:
    """A connection that is not proved to be a rank's. It gets a challenge, and is to be closed at `until_s`."""

    def __init__(self, taken: socket.socket) -> None:
        self.socket, self.until_s = _tuned(taken), time.monotonic() + ANSWER_S
        self._challenge, self._received = secrets.token_bytes(CHALLENGE_BYTES), b""
        # If that fails, so does what follows.
        with contextlib.suppress(OSError):
            taken.send(self._challenge)

    def admitted(self, contact: Contact, ranks: Container[int]) -> int:
        """Which of `ranks` has connected; it gets its proof. Raises BlockingIOError until it has responded.

        Raises ConnectionError for a stranger, and OSError if the connection fails.
        """
        while missing := RESPONSE_BYTES - len(self._received):
            if not (received := self.socket.recv(missing)):
                raise ConnectionResetError
            self._received += received
        rank, proof = contact.confirmation(self._challenge, self._received) or (-1, b"")
        if rank not in ranks or self.socket.send(proof) < PROOF_BYTES:
            raise ConnectionRefusedError
        return rank
