"""Asks a worker about its collectives. The worker answers in a thread (`agent/forkserver/collectives.py`)."""

from __future__ import annotations

import socket

from elaunch.agent.diagnosis.collectives import Counts, is_stalled, read_counts

# A worker that has not answered for this long says nothing about what it does now. It is asked once a second.
_FRESH_S = 2.5
_PACKET_BYTES_MAX = 64 << 10
# A worker that answers what it is asked has sent one at most. More wait for the next look.
_PACKETS_MAX = 16


class FlightRecorder:
    """The agent's end of one worker's thread. It never waits.

    The worker owns what it answers: it may be anything, and any amount.
    """

    def __init__(self, fd: int) -> None:
        """Take over the descriptor. Raises OSError, and leaves it open, if it is no socket of this kind."""
        end = socket.socket(fileno=fd)
        if (end.family, end.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            end.detach()
            raise OSError("no socket that keeps packets whole")
        end.setblocking(False)
        self._end = end
        # Whether a question has no answer yet.
        self._is_asked = False
        self._text = b""
        self._answered_s = 0.0
        self._sampled: Counts = {}
        self.counts: Counts = {}

    def close(self) -> None:
        """The worker's thread ends."""
        self._end.close()

    def poll(self, now_s: float) -> Counts | None:
        """The answer to the last look, if it has come; then ask again."""
        try:
            newest = self._newest()
            if newest is not None:
                self._answered_s = now_s
                if newest != self._text:
                    self._text, self.counts = newest, read_counts(newest)
            if newest is not None or not self._is_asked:
                self._end.send(b"n", socket.MSG_NOSIGNAL)
                self._is_asked = True
        except OSError:
            # The process group, the program or the generation is gone.
            return None
        return None if newest is None else self.counts

    def is_stalled(self, now_s: float) -> bool:
        """Whether since the last call a collective has not ended, and the worker has entered and ended none."""
        before, self._sampled = self._sampled, self.counts
        return bool(self.fresh_counts(now_s)) and is_stalled(before, self.counts)

    def fresh_counts(self, now_s: float) -> Counts:
        """What the worker has told just now; nothing where its thread does not come to run."""
        return self.counts if now_s - self._answered_s < _FRESH_S else {}

    def _newest(self) -> bytes | None:
        """The newest answer that has come. Raises OSError at the end."""
        newest = None
        for _ in range(_PACKETS_MAX):
            try:
                packet = self._end.recv(_PACKET_BYTES_MAX)
            except BlockingIOError:
                break
            if not packet:
                raise ConnectionResetError
            if packet[:1] == b"n":
                newest = packet[1:]
        return newest
