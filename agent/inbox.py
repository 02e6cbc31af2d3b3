"""The one place where everything that happens to an agent arrives."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from elaunch.agent.core.events import Event, Signalled


class LookAgain:
    """In the place of a look at the store, which is taken when its turn comes: many changes make one look."""


class Inbox:
    """A queue of events. Its `fileno` is readable when something waits.

    `post` may be called from any thread. `catch` turns signals into events; the handlers do nothing else.
    """

    def __init__(self) -> None:
        self._events: deque[Event | LookAgain] = deque()
        # A byte is a signal's number, or 0 to wake the loop.
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._caught: list[int] = []

    def fileno(self) -> int:
        return self._wake_r

    def post(self, event: Event | LookAgain) -> None:
        self._events.append(event)
        # Whoever takes the first event takes those behind it too. So a signal always finds room in the pipe.
        if len(self._events) == 1:
            os.write(self._wake_w, b"\0")

    def take(self) -> Event | LookAgain | None:
        """The next event, or None."""
        with suppress(BlockingIOError):
            for signum in filter(None, os.read(self._wake_r, 4096)):
                self._events.append(Signalled(signum, signal.Signals(signum).name))
        return self._events.popleft() if self._events else None

    def catch(self, signums: Iterable[int]) -> None:
        """Turn these signals into events; one that is ignored stays so (SIGHUP under nohup)."""
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for signum in signums:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
                self._caught.append(signum)

    def release(self) -> None:
        """Give the signals back their defaults: from here on they end this process."""
        signal.set_wakeup_fd(-1)
        for signum in self._caught:
            signal.signal(signum, signal.SIG_DFL)
