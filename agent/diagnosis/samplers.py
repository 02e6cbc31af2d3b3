"""Samples workers from outside, without waiting for them: their processes in /proc, and torch's flight recorders."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elaunch.agent import linux
from elaunch.agent.diagnosis.collectives import Counts, is_stalled, read_counts
from elaunch.agent.diagnosis.hang import Window

_TICKS = os.sysconf("SC_CLK_TCK")
_NS = 1e9
# The counts of a worker that has not replied for this long are stale. It is queried once a second.
_FRESH_S = 2.5
_PACKET_BYTES_MAX = 64 << 10
# A worker that replies to queries has sent one packet at most. More wait for the next poll.
_PACKETS_MAX = 16


class _Counters(NamedTuple):
    """A process's counters at one sample, in the order of `Window`'s; `identity` is unique, unlike the pid alone."""

    identity: tuple[int, int]
    state: str
    sums: tuple[float, ...]


class ProcSampler:
    """The processes of one generation's workers, by local rank: CPU time, time on a run queue, page faults, I/O."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._known: Mapping[int, _Counters] = {}
        self._sampled_s = 0.0
        # When the next sample is due, on the monotonic clock.
        self.due_s = 0.0

    def sample(self, pids: Mapping[int, int], now_s: float) -> dict[int, Window]:
        """Each worker's activity since the last sample; none for a worker that has exited, or at its first sample."""
        seconds = now_s - self._sampled_s
        found = {rank: counters for rank, pid in pids.items() if pid > 0 and (counters := _counters(pid))}
        before, self._known = self._known, found
        self._sampled_s, self.due_s = now_s, now_s + self._every_s
        return {
            rank: _window(before[rank], now, seconds)
            for rank, now in found.items()
            if seconds > 0 and rank in before and before[rank].identity == now.identity
        }


def _window(before: _Counters, now: _Counters, seconds: float) -> Window:
    # The time of a child that exited between two samples may be lost, so a sum may shrink.
    gained = (abs(new - old) for old, new in zip(before.sums, now.sums, strict=True))
    cpu_s, main_s, delay_s, faults, io_bytes, switches, children_s = gained
    return Window(seconds, cpu_s, main_s, delay_s, faults, now.state, io_bytes, switches, children_s)


def _counters(pid: int) -> _Counters | None:
    """The process's counters, or None if it has exited."""
    try:
        fields = linux.stat_fields(pid)
        cpu_s, reaped_s = ((int(fields[i]) + int(fields[i + 1])) / _TICKS for i in (11, 13))
        main_s, delay_s = cpu_s, 0.0
        # Not every kernel has schedstat.
        with suppress(FileNotFoundError):
            main_ns, delay_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
            main_s, delay_s = int(main_ns) / _NS, int(delay_ns) / _NS
        faults = int(fields[7]) + int(fields[9])
        children_s = sum(map(_cpu_s, linux.descendants(pid))) + reaped_s
        switches = int(linux.status(pid, "voluntary_ctxt_switches") or "0")
        sums = cpu_s, main_s, delay_s, faults, _io_bytes(pid), switches, children_s
        return _Counters((pid, int(fields[19])), fields[0].decode(), sums)
    except (OSError, ValueError, IndexError):
        return None


def _io_bytes(pid: int) -> int:
    """Bytes read and written; 0 where this user may not read them."""
    lines = linux.text_of(f"/proc/{pid}/io").splitlines()
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))


def _cpu_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return sum(int(ticks) for ticks in linux.stat_fields(pid)[11:15]) / _TICKS
    return 0.0


class FlightRecorder:
    """The agent's socket to the thread of one worker that reports its collectives (`agent/forkserver/collectives.py`).

    Replies are not trusted: they may have any content and any size.
    """

    def __init__(self, fd: int) -> None:
        """Take over the descriptor. Raises OSError, and leaves it open, if it is not such a socket."""
        end = socket.socket(fileno=fd)
        if (end.family, end.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            end.detach()
            raise OSError("not a SOCK_SEQPACKET socket")
        end.setblocking(False)
        self._end = end
        self._is_waiting = False
        self._text = b""
        self._replied_s = 0.0
        self._sampled: Counts = {}
        self.counts: Counts = {}

    def close(self) -> None:
        """Close the socket, which ends the worker's thread."""
        self._end.close()

    def poll(self, now_s: float) -> Counts | None:
        """The reply to the last query, if it has come; then query again."""
        try:
            newest = self._newest()
            if newest is not None:
                self._replied_s = now_s
                if newest != self._text:
                    self._text, self.counts = newest, read_counts(newest)
            if newest is not None or not self._is_waiting:
                self._end.send(b"n", socket.MSG_NOSIGNAL)
                self._is_waiting = True
        except OSError:
            # The process group, the program or the generation is gone.
            return None
        return None if newest is None else self.counts

    def is_stalled(self, now_s: float) -> bool:
        """Whether a collective has not ended, and the worker has entered and ended none since the last call."""
        before, self._sampled = self._sampled, self.counts
        return bool(self.fresh_counts(now_s)) and is_stalled(before, self.counts)

    def fresh_counts(self, now_s: float) -> Counts:
        """The counts that the worker has just reported; none where its thread is starved."""
        return self.counts if now_s - self._replied_s < _FRESH_S else {}

    def _newest(self) -> bytes | None:
        """The newest reply that has come. Raises OSError at end of file."""
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
