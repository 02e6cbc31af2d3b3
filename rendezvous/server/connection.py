"""One non-blocking connection of a server, with or without TLS: it reads what is there and writes what fits."""

from __future__ import annotations

import selectors
import socket
import ssl

_READ_BYTES = 64 << 10
# To read more from one connection at a time would starve the others. Without authentication, one TLS record is read.
READ_BYTES_MAX = 8 * _READ_BYTES
UNAUTHENTICATED_READ_BYTES_MAX = 16 << 10
# The connection to a host that disappeared is closed after about this long, also while nothing is sent.
_DEAD_AFTER_S = 20


class Closed(Exception):
    """The peer has closed the connection, or never spoke TLS."""


class Connection:
    """An accepted socket. If nothing can be read or written at once, `events` says what to wait for.

    Call `begin` before the first `read`: it gives the connection its TLS, which a connection that is never read is not
    worth.
    """

    def __init__(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            _tune(accepted)
        self.outgoing = bytearray()
        self.socket = accepted
        self._tls = tls
        self._shaken_hands = tls is None
        self._wants = selectors.EVENT_READ

    def begin(self) -> None:
        """Make ready to read, with a new `socket` for the same descriptor. Raises Closed."""
        if self._tls:
            try:
                self.socket = self._tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
            except (OSError, ValueError) as error:
                raise Closed from error

    @property
    def events(self) -> int:
        """The events to wait for, as the module `selectors` names them."""
        return self._wants | (selectors.EVENT_WRITE if self.outgoing else 0)

    def read(self, bytes_max: int = READ_BYTES_MAX) -> bytes:
        """The data that has arrived, about `bytes_max` at most; b"" if there is none yet.

        Raises Closed at the end of the stream.
        """
        pieces: list[bytes] = []
        size = 0
        try:
            if not self._shaken_hands:
                self._shake_hands()
            # No selector sees the data that TLS holds decrypted, so all of it is read here.
            while size < bytes_max or self._is_pending():
                piece = self.socket.recv(min(_READ_BYTES, bytes_max))
                if not piece:
                    raise Closed
                pieces.append(piece)
                size += len(piece)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._wants = selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            self._wants = selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError as error:
            raise Closed from error
        except Closed:
            if not pieces:
                raise
        return b"".join(pieces)

    def write(self) -> int:
        """Send as much of `outgoing` as the connection takes. Returns the number of bytes. Raises Closed."""
        before = len(self.outgoing)
        try:
            while self.outgoing:
                with memoryview(self.outgoing) as view:
                    sent = self.socket.send(view[:_READ_BYTES])
                del self.outgoing[:sent]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            raise Closed from error
        return before - len(self.outgoing)

    def close(self) -> None:
        self.socket.close()

    def _shake_hands(self) -> None:
        assert isinstance(self.socket, ssl.SSLSocket)
        self.socket.do_handshake()
        self._shaken_hands = True

    def _is_pending(self) -> bool:
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0


def _tune(accepted: socket.socket) -> None:
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 2)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_AFTER_S // 4)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_S * 1000)
