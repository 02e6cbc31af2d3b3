"""The share of the time, and of the steps, that counts in the end when workers are killed again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from bench.job import Trouble
from bench.marks import work
from bench.samples import Sample
from bench.sides import KEPT, Side, Trained, large, usual

SECTION = "state: failures"
WINDOW_S = 60.0
# One for each core, so that a step's time is the same in each window.
WORKERS = 2
# A step takes about half a second, so 20 steps are the usual "every few seconds to minutes".
SIDES = tuple(large(side) for side in (KEPT, usual(20)))
# Seconds per failure.
EVERY_S = (60, 30, 15)
ETTR, COMMITTED, SPEED = "ETTR", "committed-step share", "steps per minute"
_LOOK_S = 0.5


def windows(side: Side, every_s: int, count: int, rng: random.Random, window_s: float = WINDOW_S) -> Iterator[Sample]:
    """One job, `count` windows of `window_s`, each with a kill of a random rank per `every_s`; % and steps per minute.

    In each stretch of `every_s` the kill comes at a random moment of the first half. So a window has the whole cost of
    each of its failures. If a job dies, that is the last sample. A job that hangs makes no more steps that count.
    """
    restarts_max = int(count * window_s / every_s) + 5
    try:
        with Trained(side, max_restarts=restarts_max, workers=WORKERS) as trained:
            for _ in range(count):
                yield _window(trained, every_s, window_s, rng)
    except Trouble as trouble:
        yield Sample(SECTION, side.name, every_s, why=str(trouble))


def _window(trained: Trained, every_s: int, window_s: float, rng: random.Random) -> Sample:
    since_s = time.monotonic()
    until_s = since_s + window_s
    for number in range(int(window_s // every_s)):
        _sleep_until(trained, since_s + number * every_s + rng.uniform(0, every_s / 2))
        _kill(trained, since_s + (number + 1) * every_s, rng)
    _sleep_until(trained, until_s)
    worth = work(trained.history, since_s, until_s)
    values = {
        ETTR: 100 * worth.seconds / window_s,
        COMMITTED: 100 * worth.counted / worth.made if worth.made else 0.0,
        SPEED: 60 * worth.counted / window_s,
    }
    return Sample(SECTION, trained.side.name, every_s, values)


def _sleep_until(trained: Trained, at_s: float) -> None:
    """Sleep, and take no time from the workers. Raises Trouble if the job ends meanwhile."""
    while (left_s := at_s - time.monotonic()) > 0:
        code = trained.job.process.poll()
        if code is not None:
            raise Trouble(f"the job ended with code {code} in a window of {WORKERS} workers")
        time.sleep(min(_LOOK_S, left_s))


def _kill(trained: Trained, until_s: float, rng: random.Random) -> None:
    """Kill a random rank. If its process is just being replaced, try again a moment later."""
    while True:
        try:
            trained.kill(rng)
            return
        except Trouble:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
