"""How two ranks prove to each other that they belong to the same channel, and the socket at which one listens.

Each rank listens with a secret of its own, and puts it with its address into the process group's store. A rank that
connects says hello, the rank that listens replies, and the first one confirms. Each of these messages proves that its
sender knows the secret. Both choose a random number that the other one's proof has in it, so messages that somebody
has seen on the way are of no use a second time.
"""

from __future__ import annotations

import errno
import hmac
import math
import secrets
import socket
import struct
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Protocol

NONCE_BYTES = 16
_SECRET_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct(f"<8sI{NONCE_BYTES}s")
_MARK = b"elaunchR"

HELLO_BYTES = _HEAD.size + _PROOF_BYTES
REPLY_BYTES = NONCE_BYTES + _PROOF_BYTES
CONFIRMATION_BYTES = _PROOF_BYTES

# A rank says its hello at once. A connection without one by then is no rank's, or its host hangs.
_HELLO_S = 5.0
# Connections that have not said it yet; of more than these the oldest is closed.
_UNKNOWN_MAX = 64
# The kernel holds connections until this rank polls. All ranks that may connect have a place, and some strangers.
_BACKLOG_MAX = 1024
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# A host that is gone answers no probe, and is noticed after 30 s while nothing is on its way to it. Without an agent
# nobody else notices; an agent's lease ends long before.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


@dataclass(frozen=True)
class Contact:
    """Where rank `rank` listens for the ranks of `channel`, and its secret.

    In a greeting `asked` is the random number of the rank that connects, `answered` that of this rank.
    """

    channel: str
    rank: int
    address: str
    port: int
    secret: bytes = field(repr=False)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    def to_bytes(self) -> bytes:
        """Without channel and rank, which are in the key."""
        return self.secret + f"{self.port} {self.address}".encode()

    @classmethod
    def from_bytes(cls, channel: str, rank: int, content: bytes) -> Contact:
        secret, place = content[:_SECRET_BYTES], content[_SECRET_BYTES:].decode()
        port, _, address = place.partition(" ")
        return cls(channel, rank, address, int(port), secret)

    def hello(self, sender: int, asked: bytes) -> bytes:
        """The first words of rank `sender` to this rank."""
        return _HEAD.pack(_MARK, sender, asked) + self._proof("hello", sender, asked)

    def heard(self, hello: bytes) -> tuple[int, bytes] | None:
        """`sender` and `asked` of a hello to this rank; None if no rank of the channel has said it."""
        mark, sender, asked = _HEAD.unpack_from(hello)
        is_right = hmac.compare_digest(hello[_HEAD.size :], self._proof("hello", sender, asked))
        return (sender, asked) if mark == _MARK and is_right else None

    def reply(self, sender: int, asked: bytes, answered: bytes) -> bytes:
        """The answer of this rank."""
        return answered + self._proof("reply", sender, asked + answered)

    def confirmation(self, sender: int, asked: bytes, reply: bytes) -> bytes | None:
        """The last words of `sender`; None if this rank has not said that reply."""
        answered = reply[:NONCE_BYTES]
        if not hmac.compare_digest(reply, self.reply(sender, asked, answered)):
            return None
        return self._proof("confirmed", sender, asked + answered)

    def _proof(self, word: str, sender: int, numbers: bytes) -> bytes:
        said = f"{word} {self.channel} {sender} {self.rank} ".encode() + numbers
        return hmac.digest(self.secret, said, "sha256")


class Contacts(Protocol):
    """The place where each rank of a channel writes its contact, for all others to read."""

    def own_address(self) -> str:
        """The address at which the others reach this process. Raises OSError."""

    def publish(self, rank: int, content: bytes) -> None:
        """Write the contact of this rank, in place of an older one."""

    def find(self, rank: int) -> bytes | None:
        """The newest contact of this rank; None if there is none yet. Does not wait; may raise RuntimeError."""


def tuned(made: socket.socket) -> socket.socket:
    """The socket, which does not block from now on, sends at once, and notices that the other host is gone."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


@dataclass(eq=False)
class _Guest:
    """A connection that is not proved to be a rank's. `rank` has said hello on it, if it is not -1."""

    socket: socket.socket
    until_s: float
    heard: bytes = b""
    rank: int = -1
    confirmation: bytes = b""


class RankListener:
    """Listens at `address` for the ranks of `channel` that are higher than `rank`. `contact` is how they find it.

    It has no thread: call `admit` when one of `descriptors` can be read, and at `until_s`.
    """

    def __init__(self, channel: str, rank: int, world_size: int, address: str) -> None:
        self._missing = set(range(rank + 1, world_size))
        contact = Contact(channel, rank, address, 0, secrets.token_bytes(32))
        self._socket = socket.socket(contact.family)
        try:
            self._socket.setblocking(False)
            self._socket.bind((address, 0))
            # For each the kernel keeps what a stranger sends, 128 kB or so.
            self._socket.listen(min(len(self._missing) + _UNKNOWN_MAX, _BACKLOG_MAX))
        except OSError as error:
            self._socket.close()
            # A link-local address of IPv6, for example, which is nothing without an interface.
            why = f"this rank cannot listen at {address} ({error.strerror}), so the other ranks cannot reach it"
            raise OSError(f"{why}; GLOO_SOCKET_IFNAME=… names the interface to use") from error
        self.contact = replace(contact, port=self._socket.getsockname()[1])
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
        """When the next connection without a hello is to be closed."""
        return min((guest.until_s for guest in self._guests), default=math.inf)

    def admit(self, readable: Container[int]) -> list[tuple[int, socket.socket]]:
        """Accept connections, close those of strangers, and return those of ranks. Raises OSError if none has room."""
        has_room = self._accept() if self._socket.fileno() in readable else True
        now_s, found = time.monotonic(), []
        for guest in [*self._guests]:
            if self._is_proved(guest):
                self._missing.discard(guest.rank)
                found.append((guest.rank, guest.socket))
                self._guests.remove(guest)
            elif now_s >= guest.until_s or (guest.rank < 0 and not has_room):
                self._turn_away(guest)
        return found

    def close(self) -> None:
        self._socket.close()
        for guest in [*self._guests]:
            self._turn_away(guest)

    def _accept(self) -> bool:
        """Accept some connections. Returns False if there is no room for more, and strangers may be the reason."""
        for _ in range(_UNKNOWN_MAX // 4):
            try:
                taken, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    # There is no more, or this one was given up.
                    return True
                if not self._unknown:
                    # The rank that connects would wait for its answer, and this one would look at it again and again.
                    raise
                return False
            self._guests.append(_Guest(tuned(taken), time.monotonic() + _HELLO_S))
            if len(self._unknown) > _UNKNOWN_MAX:
                self._turn_away(self._unknown[0])
        return True

    @property
    def _unknown(self) -> list[_Guest]:
        """The connections without a hello, the oldest first."""
        return [guest for guest in self._guests if guest.rank < 0]

    def _is_proved(self, guest: _Guest) -> bool:
        """Go on with the greeting. Returns whether it is over, and this is a rank; a stranger is turned away."""
        try:
            while len(guest.heard) < (wanted := CONFIRMATION_BYTES if guest.confirmation else HELLO_BYTES):
                if not (said := guest.socket.recv(wanted - len(guest.heard))):
                    break
                guest.heard += said
                if len(guest.heard) == HELLO_BYTES and not guest.confirmation:
                    self._reply(guest)
        except BlockingIOError:
            return False
        except OSError:
            guest.heard = b""
        if guest.confirmation and hmac.compare_digest(guest.heard, guest.confirmation) and guest.rank in self._missing:
            return True
        self._turn_away(guest)
        return False

    def _reply(self, guest: _Guest) -> None:
        """Answer a hello; raises ConnectionRefusedError if it is not one of a rank that may connect."""
        rank, asked = self.contact.heard(guest.heard) or (-1, b"")
        if rank not in self._missing:
            raise ConnectionRefusedError
        # An earlier try of that rank.
        for former in [each for each in self._guests if each.rank == rank]:
            self._turn_away(former)
        reply = self.contact.reply(rank, asked, secrets.token_bytes(NONCE_BYTES))
        if guest.socket.send(reply) < len(reply):
            raise ConnectionRefusedError
        # It knows the secret, and has all the time it needs.
        guest.rank, guest.until_s, guest.heard = rank, math.inf, b""
        guest.confirmation = self.contact.confirmation(rank, asked, reply) or b""

    def _turn_away(self, guest: _Guest) -> None:
        guest.socket.close()
        if guest in self._guests:
            self._guests.remove(guest)
