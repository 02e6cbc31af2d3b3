"""The socket at which a rank listens: it lets higher ranks in, and closes the connections of strangers."""

from __future__ import annotations

import errno
import hmac
import math
import secrets
import socket
import time
from collections.abc import Container
from dataclasses import dataclass

from elaunch.trainer.ranks.greeting import CONFIRMATION_BYTES, HELLO_BYTES, NONCE_BYTES, Contact
from elaunch.trainer.ranks.tcp import listening, tuned

# A rank says its hello at once. A connection without one by then is no rank's, or its host hangs.
_HELLO_S = 5.0
# Connections that have not said it yet; of more than these the oldest is closed.
_UNKNOWN_MAX = 64
# The kernel holds connections until this rank looks. All ranks that may connect have room, and some strangers.
_BACKLOG_MAX = 1024
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


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
        self._socket = listening(address, min(len(self._missing) + _UNKNOWN_MAX, _BACKLOG_MAX))
        self.contact = Contact(channel, rank, address, self._socket.getsockname()[1], secrets.token_bytes(32))
        self._guests: list[_Guest] = []
        # When a rank has left in the middle of its greeting, and has not begun another one.
        self._left_s: dict[int, float] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all ranks that may connect have done so."""
        return not self._missing

    @property
    def descriptors(self) -> list[int]:
        return [self._socket.fileno(), *(guest.socket.fileno() for guest in self._guests)]

    def left_before(self, at_s: float) -> list[int]:
        """The ranks that had left by then, after their hello, and have not come again."""
        return [rank for rank, left_s in self._left_s.items() if left_s < at_s]

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
        if guest.rank in self._missing:
            self._left_s[guest.rank] = time.monotonic()
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
        self._left_s.pop(rank, None)
        # It knows the secret, and has all the time it needs.
        guest.rank, guest.until_s, guest.heard = rank, math.inf, b""
        guest.confirmation = self.contact.confirmation(rank, asked, reply) or b""

    def _turn_away(self, guest: _Guest) -> None:
        guest.socket.close()
        if guest in self._guests:
            self._guests.remove(guest)
