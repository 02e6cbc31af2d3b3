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
    """A queue of events with a file descriptor that is readable when something waits.

    `post` may be called from any thread. `catch` turns signals into events; the handlers do nothing else.
    """

    def __init__(self) -> None:
        self._events: deque[Event | LookAgain] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signal_r, self._signal_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._caught: list[int] = []

    @property
    def fds(self) -> tuple[int, int]:
        return self._wake_r, self._signal_r

    def post(self, event: Event | LookAgain) -> None:
        self._events.append(event)
        # A full pipe already holds a wake-up.
        with suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")

    def take(self) -> Event | LookAgain | None:
        """The next event, or None."""
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        with suppress(BlockingIOError):
            for signum in os.read(self._signal_r, 256):
                self._events.append(Signalled(signum, signal.Signals(signum).name))
        return self._events.popleft() if self._events else None

    def catch(self, signums: Iterable[int]) -> None:
        """Turn these signals into events; one that is ignored stays so (SIGHUP under nohup)."""
        signal.set_wakeup_fd(self._signal_w, warn_on_full_buffer=False)
        for signum in signums:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
                self._caught.append(signum)

    def release(self) -> None:
        """Give the signals back their defaults: from here on they end this process."""
        signal.set_wakeup_fd(-1)
        for signum in self._caught:
            signal.signal(signum, signal.SIG_DFL)
