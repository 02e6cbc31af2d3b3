"""How two ranks prove to each other that they belong to the same channel; pure.

Each rank listens with a secret of its own, and puts it with its address into the process group's store. A rank that
connects shows that it knows the secret, and the rank that listens shows the same. No other process can.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field

_SECRET_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct("<8sI")
_MARK = b"elaunchR"

HELLO_BYTES = _HEAD.size + _PROOF_BYTES
REPLY_BYTES = _PROOF_BYTES


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

    def hello(self, sender: int) -> bytes:
        """What `sender` says to this rank first."""
        return _HEAD.pack(_MARK, sender) + self._proof("hello", sender)

    def reply(self, sender: int) -> bytes:
        """What this rank answers."""
        return self._proof("reply", sender)

    def sender_of(self, hello: bytes) -> int | None:
        """The rank that has said this to this rank; None if it is no rank of the channel."""
        mark, sender = _HEAD.unpack_from(hello)
        is_right = hmac.compare_digest(hello[_HEAD.size :], self._proof("hello", sender))
        return int(sender) if mark == _MARK and is_right else None

    def _proof(self, word: str, sender: int) -> bytes:
        return hmac.digest(self.secret, f"{word} {self.channel} {sender} {self.rank}".encode(), "sha256")
