"""Time from SIGKILL of one rank until all workers are gone, under Lightning: `python -m bench.survivors [KILLS]`.

Lightning must be installed, as in the environment of `make ecosystem`. The line that is printed has the median and the
95th percentile, and the load of the host.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial

from bench.contenders import ELAUNCH
from bench.job import SCRIPTS, Job
from bench.libraries import require
from bench.stamps import at
from bench.stats import percentile

WORKERS, KILLS = 4, 20
_START_LIMIT_S, _RESTART_LIMIT_S = 120.0, 60.0
_DELAY_S_MAX = 0.1


def gone(kills: int, rng: random.Random) -> list[float]:
    """Seconds from each kill to the exit of the last worker of its generation."""
    program = (str(SCRIPTS / "lightning_steps.py"),)
    killed_s: list[float] = []
    with Job(ELAUNCH, WORKERS, program, max_restarts=kills + 5, timeline=True) as job:
        for generation in range(kills + 1):
            limit_s = _RESTART_LIMIT_S if generation else _START_LIMIT_S
            pids = job.wait_for(partial(_training, job, generation), "all ranks train", limit_s)
            if generation < kills:
                time.sleep(rng.uniform(0, _DELAY_S_MAX))
                killed_s.append(time.monotonic())
                os.kill(rng.choice(pids), signal.SIGKILL)
        exits = [stamp for stamp in job.timeline() if stamp.event == "exited"]
    ends_s = [max(each.monotonic_s for each in exits if each.generation == generation) for generation in range(kills)]
    return [end_s - at_s for end_s, at_s in zip(ends_s, killed_s, strict=True)]


def _training(job: Job, generation: int) -> list[int] | None:
    pids = [stamp.pid for stamp in at(job.stamps(), generation, "training").values()]
    return pids if len(pids) == WORKERS else None


def main() -> None:
    """Print the figures."""
    require("bench.survivors", ("lightning",))
    times_s = gone(int(sys.argv[1]) if len(sys.argv) > 1 else KILLS, random.Random())
    p50_s, p95_s = percentile(times_s, 0.5), percentile(times_s, 0.95)
    load = os.getloadavg()[0]
    print(f"kill -> all {WORKERS} gone, n = {len(times_s)}: p50 {p50_s:.3f} s, p95 {p95_s:.3f} s; load {load:.1f}")


if __name__ == "__main__":
    main()
