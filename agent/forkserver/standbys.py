"""Workers that the fork server has forked ahead: each waits for the order that makes it a worker.

A fork with what a process does before its order takes 5 to 10 ms of CPU time. In a restart of 8 workers on two cores
that is most of the time. A standby has done it while the last generation trained.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from elaunch.agent.forkserver import wire
from elaunch.agent.linux import is_as_forked, set_command_line

# Between two forks: all of them at once would be felt by the program, whose CPUs they take.
_PAUSE_S = 0.05

Order = tuple[dict[str, Any], tuple[int, ...]]


class Standbys:
    """The fork server's processes that wait. `wait_s` says when `fork` is to be called."""

    def __init__(self) -> None:
        self._waiting: dict[int, socket.socket] = {}
        self._missing = 0
        self._next_s = 0.0

    @property
    def wait_s(self) -> float | None:
        """In how many seconds the next one is to be forked. None if there are enough."""
        return max(self._next_s - time.monotonic(), 0.0) if self._missing else None

    def want(self, count: int) -> None:
        """From now on there are to be so many. Those that are too many end now."""
        for pid in list(self._waiting)[count:]:
            self._end(pid)
        self._missing = count - len(self._waiting)

    def fork(self) -> tuple[int, socket.socket | None]:
        """Fork one. Returns 0 and the socket for its order in the new process, its pid in this one.

        Raises OSError, and tries no more then: the next generation's workers are forked when they are needed.
        """
        missing, self._missing = self._missing, 0
        ours, theirs = wire.pair()
        with theirs:
            pid = os.fork()
            if pid == 0:
                end = theirs.dup()
                # The others' sockets must end with this process's parent.
                for each in (ours, *self._waiting.values()):
                    each.close()
                return 0, end
        self._waiting[pid] = ours
        self._missing, self._next_s = missing - 1, time.monotonic() + _PAUSE_S
        return pid, None

    def give(self, order: dict[str, Any], fds: tuple[int, ...]) -> int | None:
        """Make one of them a worker. Returns its pid, or None if none waits.

        One that has got a signal meanwhile is no longer what a fork would be, and ends. The job restarts now, so no
        more are forked until `want` is called again.
        """
        self._missing = 0
        while self._waiting:
            pid, end = next(iter(self._waiting.items()))
            if is_as_forked(pid):
                with suppress(OSError):
                    wire.send(end, order, fds)
                    del self._waiting[pid]
                    end.close()
                    return pid
            self._end(pid)
        return None

    def forget(self, pid: int) -> None:
        """It has ended, if it is one that waited."""
        end = self._waiting.pop(pid, None)
        if end:
            end.close()

    def _end(self, pid: int) -> None:
        # Nobody has reaped it, so the pid is still its own. One that SIGSTOP holds would not end by itself.
        os.kill(pid, signal.SIGKILL)
        self.forget(pid)


def wait(end: socket.socket) -> Order:
    """In a standby: the order. The process ends if none comes any more."""
    set_command_line(("elaunch: next worker",), "elaunch-next")
    order = wire.receive(end)
    if order is None:
        os._exit(0)
    end.close()
    return order
