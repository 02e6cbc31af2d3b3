"""What it costs a healthy job to be watched: step times with everything switched on, beside a job that has nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import fmean, median

from bench.contenders import ELAUNCH, Contender
from bench.job import SCRIPTS, Job, Trouble
from bench.samples import Sample

SECTION = "watching"
WORKERS = 2
STEPS = 600
MEDIAN, MEAN = "median step", "mean step"
_LIMIT_S = 120.0
# What a user may switch on to see more, and what switches off what is on by default.
_ON = ("--log-dir", "logs", "--metrics-port", "0", "--on-event", "true", "--log-format", "json")
_OFF = ("--on-hang", "off")
WATCHED = Contender("elaunch, everything on", ELAUNCH.program, (*ELAUNCH.options, *_ON), ELAUNCH.variables)
PLAIN = Contender("elaunch, everything off", ELAUNCH.program, (*ELAUNCH.options, *_OFF), ELAUNCH.variables)


def pair(turn: int) -> Iterator[Sample]:
    """One job of each, in turns first."""
    for contender in (WATCHED, PLAIN) if turn % 2 else (PLAIN, WATCHED):
        yield _steps(contender)


def _steps(contender: Contender) -> Sample:
    env = {"BENCH_STEPS": str(STEPS), "BENCH_SECONDS": "seconds.json"}
    with Job(contender, WORKERS, (str(SCRIPTS / "steps.py"),), env=env) as job:
        try:
            job.process.wait(_LIMIT_S)
            seconds = json.loads((job.folder / "seconds.json").read_text())
        except (Trouble, OSError, ValueError) as trouble:
            return Sample(SECTION, contender.name, WORKERS, why=str(trouble))
    return Sample(SECTION, contender.name, WORKERS, {MEDIAN: median(seconds), MEAN: fmean(seconds)})
