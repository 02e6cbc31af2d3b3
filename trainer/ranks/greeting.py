"""How two ranks prove to each other that they belong to the same channel; pure.

Each rank listens with a secret of its own, and puts it with its address into the process group's store. A rank that
connects says hello, the rank that listens replies, and the first one confirms. Each of these words proves that its
speaker knows the secret. Both choose a random number that the other one's proof has in it, so words that somebody has
seen on the way are of no use a second time.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from typing import Protocol

NONCE_BYTES = 16
_SECRET_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct(f"<8sI{NONCE_BYTES}s")
_MARK = b"elaunchR"

HELLO_BYTES = _HEAD.size + _PROOF_BYTES
REPLY_BYTES = NONCE_BYTES + _PROOF_BYTES
CONFIRMATION_BYTES = _PROOF_BYTES


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

    @property
    def may_be_old(self) -> bool:
        """Whether `find` may return the contact of the process that was this rank before a restart."""

    def publish(self, rank: int, content: bytes) -> None:
        """Write the contact of this rank, in place of an older one."""

    def find(self, rank: int) -> bytes | None:
        """The newest contact of this rank; None if there is none yet. Does not wait; may raise RuntimeError."""
