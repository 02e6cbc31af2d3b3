"""Times on one node: from the command or from SIGKILL of a worker to the last rank, and of a bare import."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.job import LIMIT_PRELOAD, LIMIT_TORCH, SCRIPTS, Contender, Job, Trouble, kill_rank
from bench.samples import Sample
from bench.stamps import Stamp, all_at_s, at, restart_stages, start_stages
from elaunch.agent.environment import DEFAULT_PRELOAD

START, RESTART = "start", "restart"
LIMIT_SECTION = "import"
LINE_SECTION = "first line"
IMPORT = "import"
ALL_REDUCE, STEP, LINE = "first all-reduce", "first optimizer step", "first line"
_LIMIT_S = 120.0


def start(contender: Contender, workers: int) -> Sample:
    """One job that makes one optimizer step. The values (s) are the last rank's."""
    program = (str(SCRIPTS / "train.py"),)
    with Job(contender, workers, program, env={"BENCH_STEPS": "1", "BENCH_STEP_S": "0"}, timeline=True) as job:
        try:
            # After the step torch shuts down. The job is ended then, without waiting for that.
            stepped_s = job.wait_for(
                lambda: all_at_s(job.stamps(), 0, "step", workers), "all had made a step", _LIMIT_S
            )
        except Trouble as trouble:
            return Sample(START, contender.name, workers, why=str(trouble))
        stamps = job.stamps()
        reduced_s = all_at_s(stamps, 0, "all_reduce", workers)
        assert reduced_s is not None
        values = {ALL_REDUCE: reduced_s - job.started_s, STEP: stepped_s - job.started_s}
        stages = start_stages(job.timeline(), stamps, workers, job.started_s) if contender.ours else {}
        return Sample(START, contender.name, workers, values, stages)


def bare_import(name: str) -> Sample:
    """The limit: a bare interpreter's imports (s, from its start to the end of the last import)."""
    modules = {LIMIT_TORCH: ("torch",), LIMIT_PRELOAD: DEFAULT_PRELOAD}[name]
    program = f"import {', '.join(modules)}, time; print(time.monotonic(), flush=True)"
    started_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return Sample(LIMIT_SECTION, name, 0, why=f"did not import within {_LIMIT_S:g} s")
    if done.returncode:
        last = "".join(f": {line}" for line in done.stderr.splitlines()[-1:])
        return Sample(LIMIT_SECTION, name, 0, why=f"the import ended with code {done.returncode}{last}")
    return Sample(LIMIT_SECTION, name, 0, {IMPORT: float(done.stdout) - started_s})


def first_line(contender: Contender) -> Sample:
    """Time (s) from the command until the first line of one worker, which imports nothing, has been read."""
    with Job(contender, 1, (str(SCRIPTS / "first_line.py"),), stdout=subprocess.PIPE) as job:
        # A launcher that ends without a line ends this loop. A launcher that hangs needs a person's Ctrl-C.
        for line in job.stdout:
            if b"first line" in line:
                seconds = time.monotonic() - job.started_s
                return Sample(LINE_SECTION, contender.name, 1, {LINE: seconds})
        return Sample(LINE_SECTION, contender.name, 1, why="no line came")


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
            yield Sample(RESTART, contender.name, workers, why=str(trouble))


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
    return Sample(RESTART, contender.name, workers, values, stages)


def _wait_until_all(job: Job, generation: int, event: str, workers: int, limit_s: float) -> list[Stamp]:
    def stamped() -> list[Stamp] | None:
        stamps = job.stamps()
        return stamps if all_at_s(stamps, generation, event, workers) is not None else None

    what = "all were training" if generation == 0 else "all were training again"
    return job.wait_for(stamped, what, limit_s)
