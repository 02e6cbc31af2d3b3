"""Asks a worker about its collectives. The worker answers in a thread (`agent/forkserver/collectives.py`)."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

from elaunch.agent.diagnosis.collectives import Collective, Counts, is_stalled, read_counts, read_entries
from elaunch.agent.linux import descriptors, in_threads

# A worker that has not answered for this long says nothing about what it does now. It is asked once a second.
_FRESH_S = 2.5
_PACKET_BYTES_MAX = 64 << 10
_ENTRIES_BYTES_MAX = 32 << 20
# A worker that answers what it is asked has sent two at most. More wait for the next look.
_PACKETS_MAX = 16
_ANSWER_S = 3.0
# A thread that has not answered for this long does not come to run: somebody holds the GIL, or all threads.
_SILENT_S = 0.5


class FlightRecorder:
    """The agent's end of one worker's thread. Any thread may call `entries`; all else is the loop's.

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
        self._lock = threading.Lock()
        # The answer that nobody has taken yet.
        self._newest: bytes | None = None
        # When the question was sent that has no answer yet.
        self._asked_s: float | None = None
        self._text = b""
        self._answered_s = 0.0
        self.counts: Counts = {}
        self._sampled: Counts = {}
        # Begins and ends of answers with entries: odd while the worker writes one. The second is the newest one told.
        self._turns, self._turns_told = 0, 0

    def close(self) -> None:
        """The worker's thread ends."""
        self._end.close()

    def look(self, now_s: float) -> Counts | None:
        """The answer to the last look, if it has come; then ask again. It never waits."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._look(now_s)
        except OSError:
            # The process group, the program or the generation is gone.
            return None
        finally:
            self._lock.release()

    def _look(self, now_s: float) -> Counts | None:
        self._take_packets()
        newest, self._newest = self._newest, None
        if newest is not None:
            self._answered_s = now_s
            if newest != self._text:
                self._text, self.counts = newest, read_counts(newest)
        if newest is not None or self._asked_s is None:
            self._asked_s = now_s
            self._end.send(b"n", socket.MSG_NOSIGNAL)
        return None if newest is None else self.counts

    def _take_packets(self) -> None:
        for _ in range(_PACKETS_MAX):
            packet = self._receive()
            if packet is None:
                return
            answer, fds = packet
            _close(fds)
            if answer[:1] == b"n":
                self._newest = answer[1:]

    def is_stalled(self, now_s: float) -> bool:
        """Whether since the last call a collective has not ended, and the worker has entered and ended none."""
        before, self._sampled = self._sampled, self.counts
        return now_s - self._answered_s < _FRESH_S and is_stalled(before, self.counts)

    def take_disturbed(self) -> bool:
        """Whether the worker wrote down entries since the last call. That takes it up to 60 ms, and memory.

        One that does not answer, since it lets no other thread run, does what it does for itself.
        """
        before, self._turns_told = self._turns_told, self._turns
        return self._turns_told != before or self._turns_told % 2 == 1

    def entries(self, kept_max: int) -> tuple[Collective, ...]:
        """What the worker has entered, newest last, if its recorder keeps at most `kept_max`. Waits for the answer."""
        # The loop may close it meanwhile: it has no descriptor then.
        with self._lock, suppress(OSError, ValueError):
            begun_s = time.monotonic()
            is_silent = self._asked_s is not None and begun_s - self._asked_s > _SILENT_S
            if is_silent and not self._is_readable(0.0):
                return ()
            self._turns += 1
            try:
                return self._entries(kept_max, begun_s + _ANSWER_S)
            finally:
                self._turns += 1
        return ()

    def _entries(self, kept_max: int, until_s: float) -> tuple[Collective, ...]:
        self._end.send(b"e%d" % kept_max, socket.MSG_NOSIGNAL)
        while (left_s := until_s - time.monotonic()) > 0:
            self._is_readable(left_s)
            packet = self._receive()
            if packet is None:
                continue
            kind, fds = packet
            if kind == b"e" and fds:
                return read_entries(_read(fds[0]))
            # A worker may send descriptors with anything.
            _close(fds)
            if kind[:1] == b"n":
                self._asked_s = None
        return ()

    def _is_readable(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def _receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """A packet and its descriptors; None if none is there. Raises OSError at the end."""
        try:
            data, ancillary, *_ = self._end.recvmsg(_PACKET_BYTES_MAX, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        fds = descriptors(ancillary)
        if not data:
            _close(fds)
            raise ConnectionResetError
        return data, fds


def all_entries(recorders: Mapping[int, FlightRecorder], kept_max: int) -> dict[int, tuple[Collective, ...]]:
    """What each of these workers has entered. It waits for all of them, so it is called where nobody must not wait."""
    works = {rank: partial(recorder.entries, kept_max) for rank, recorder in recorders.items()}
    # Each may first wait for another thread's question to the same worker.
    found = in_threads(works, 2 * _ANSWER_S, "elaunch-recorder")
    return {rank: found.get(rank, ()) for rank in recorders}


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _read(fd: int) -> bytes:
    try:
        size = min(os.fstat(fd).st_size, _ENTRIES_BYTES_MAX)
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)
