"""Times from SIGKILL of one worker until all ranks reduce again, and until all make an optimizer step again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from bench.contenders import Contender
from bench.job import SCRIPTS, Job, Trouble, kill_rank
from bench.launches import ALL_REDUCE, STEP
from bench.samples import Sample
from bench.stamps import Stamp, all_at_s, at, restart_stages

SECTION = "restart"
# A contender that failed this many restarts at a number of workers takes no more turns at that number.
FAILURES_MAX = 3
_START_LIMIT_S = 120.0
_STEP_S = 0.02
# A job trains for a while before a rank dies.
_TRAINS_S, _TRAINS_PER_WORKER_S = 1.5, 0.1
# Then a kill comes a random time later, up to this. It must not keep step with a launcher's polling.
_DELAY_S_MAX = 0.3


def restarts(contender: Contender, workers: int, count: int, limit_s: float, rng: random.Random) -> Iterator[Sample]:
    """One job in which a random rank is killed `count` times. Yields a sample for each kill.

    If a restart takes longer than `limit_s`, or the job dies, that is the last sample.
    """
    env = {"BENCH_STEPS": "0", "BENCH_STEP_S": str(_STEP_S)}
    program = (str(SCRIPTS / "train.py"),)
    with Job(contender, workers, program, max_restarts=count + 5, env=env, timeline=True) as job:
        try:
            _wait_until_all(job, 0, "training", workers, _START_LIMIT_S)
            for generation in range(1, count + 1):
                yield _restart(job, contender, workers, generation, limit_s, rng)
        except Trouble as trouble:
            yield Sample(SECTION, contender.name, workers, why=str(trouble))


def _restart(
    job: Job, contender: Contender, workers: int, generation: int, limit_s: float, rng: random.Random
) -> Sample:
    time.sleep(_TRAINS_S + _TRAINS_PER_WORKER_S * workers + rng.uniform(0, _DELAY_S_MAX))
    rank = rng.randrange(workers)
    pid = at(job.stamps(), generation - 1, "training")[rank].pid
    killed_s = kill_rank(rank, pid)
    stamps = _wait_until_all(job, generation, "training", workers, limit_s)
    reduced_s, stepped_s = (all_at_s(stamps, generation, event, workers) for event in ("all_reduce", "step"))
    assert reduced_s is not None
    assert stepped_s is not None
    values = {ALL_REDUCE: reduced_s - killed_s, STEP: stepped_s - killed_s}
    stages = {}
    if contender.ours:
        stages = restart_stages(job.timeline(), stamps, generation, workers, killed_s)
    return Sample(SECTION, contender.name, workers, values, stages)


def _wait_until_all(job: Job, generation: int, event: str, workers: int, limit_s: float) -> list[Stamp]:
    def stamped() -> list[Stamp] | None:
        stamps = job.stamps()
        return stamps if all_at_s(stamps, generation, event, workers) is not None else None

    what = "all were training" if generation == 0 else "all were training again"
    return job.wait_for(stamped, what, limit_s)
