"""Runs several pieces of work at once in daemon threads, and waits for all of them no longer than asked.

The threads of `concurrent.futures` are joined when the process exits. One of them that waits for a process in an
uninterruptible sleep would hold that exit up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from elaunch.agent.linux import start_thread

Found = TypeVar("Found")


def at_once(works: Sequence[Callable[[], Found]], within_s: float, name: str, most: int) -> dict[int, Found]:
    """What the works return, by their place in `works`: of all, or of those that end `within_s` seconds.

    At most `most` threads run, which are called `name`. Where the system gives no thread, this one works. A work must
    not raise.
    """
    waiting = iter(enumerate(works))
    found: dict[int, Found] = {}
    changed = threading.Condition()
    end_s = time.monotonic() + within_s

    def work() -> None:
        while True:
            with changed:
                place, task = next(waiting, (-1, None))
            if task is None or time.monotonic() >= end_s:
                return
            result = task()
            with changed:
                found[place] = result
                changed.notify_all()

    threads = [start_thread(work, name) for _ in range(min(most, len(works)))]
    if not any(threads):
        work()
    with changed:
        changed.wait_for(lambda: len(found) == len(works), max(0.0, end_s - time.monotonic()))
        return dict(found)
