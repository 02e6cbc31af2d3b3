"""agent.at_once: work that does not end holds nobody up."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

from elaunch.agent.at_once import at_once


def test_each_work_has_its_place_and_no_more_threads_run_than_asked() -> None:
    running = threading.Semaphore(2)

    def work(number: int) -> tuple[int, bool]:
        has_room = running.acquire(blocking=False)
        if has_room:
            running.release()
        return number * number, has_room

    assert at_once([partial(work, n) for n in range(50)], 180.0, "test", 2) == {n: (n * n, True) for n in range(50)}
    assert at_once([], 60.0, "test", 2) == {}


def test_work_that_does_not_end_is_left_out_and_does_not_hold_the_process_up() -> None:
    script = """
import threading
from elaunch.agent.at_once import at_once
print(at_once([lambda: 1, threading.Event().wait, lambda: 3], 0.2, "test", 3))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True)

    assert ended.stdout == "{0: 1, 2: 3}\n"
