"""Times from the command to the first all-reduce and the first optimizer step, and the time of a bare import."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bench.contenders import LIMIT_PRELOAD, LIMIT_TORCH, Contender
from bench.job import SCRIPTS, Job, Trouble
from bench.samples import Sample
from bench.stamps import all_at_s, start_stages
from elaunch.agent.environment import DEFAULT_PRELOAD

SECTION = "start"
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
            return Sample(SECTION, contender.name, workers, why=str(trouble))
        stamps = job.stamps()
        reduced_s = all_at_s(stamps, 0, "all_reduce", workers)
        assert reduced_s is not None
        values = {ALL_REDUCE: reduced_s - job.started_s, STEP: stepped_s - job.started_s}
        stages = start_stages(job.timeline(), stamps, workers, job.started_s) if contender.ours else {}
        return Sample(SECTION, contender.name, workers, values, stages)


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
