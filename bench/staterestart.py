"""SIGKILL of one worker: the steps that its group loses, and the time until the first new step is done."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from bench.job import Trouble
from bench.marks import NEXT_STEP, History, restart_stages, resumed
from bench.samples import Sample
from bench.sides import WORKERS, Side, Trained

SECTION = "state: restart"
LOST = "steps lost"
# Kills are spread over this many steps, the longest distance between two saves.
_SPREAD_STEPS = 50
# A step takes less time than this, so a kill may strike at every moment of a step.
_SPREAD_S = 0.2


def restarts(side: Side, count: int, limit_s: float, rng: random.Random) -> Iterator[Sample]:
    """One job in which a random rank is killed `count` times. Yields a sample for each kill.

    If a restart takes longer than `limit_s`, or the job dies, that is the last sample.
    """
    try:
        with Trained(side, max_restarts=count + 5) as trained:
            for generation in range(1, count + 1):
                yield _restart(trained, generation, limit_s, rng)
    except Trouble as trouble:
        yield Sample(SECTION, side.name, WORKERS, why=str(trouble))


def _restart(trained: Trained, generation: int, limit_s: float, rng: random.Random) -> Sample:
    wanted = trained.history.newest[generation - 1] + rng.randrange(_SPREAD_STEPS)
    trained.wait_for(lambda h: h.newest[generation - 1] >= wanted or None, "a few steps were made", limit_s)
    time.sleep(rng.uniform(0, _SPREAD_S))
    killed_s = trained.kill(rng)

    def is_new(history: History) -> float | None:
        again = resumed(history, generation)
        return None if again is None else history.all_done_s(generation, again.next_step, trained.workers)

    done_s = trained.wait_for(is_new, "all had made a new step", limit_s)
    history = trained.history
    again = resumed(history, generation)
    assert again is not None
    stages = restart_stages(trained.job.timeline(), history, generation, trained.workers, killed_s)
    values = {LOST: float(again.lost), NEXT_STEP: done_s - killed_s}
    return Sample(SECTION, trained.side.name, trained.workers, values, stages)
