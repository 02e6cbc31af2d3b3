"""What it costs a healthy job to be watched: step times with everything switched on, beside a job that has nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import fmean, median

import psutil

from bench.contenders import ELAUNCH, Contender
from bench.job import SCRIPTS, Job, Trouble
from bench.samples import Sample
from bench.steady import WORKER, cpu_time_s, family_of

SECTION = "watching"
WORKERS = 2
STEPS = 600
MEDIAN, MEAN = "median step", "mean step"
# Each in % of the workers' time. CPU time is hardly disturbed by what else the machine does; the time of a step is.
PROCESSES, THREADS, REPORTS = "elaunch's processes", "elaunch's threads in the workers", "reports of steps"
IN_ALL = "in all"
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
    env = {"BENCH_STEPS": str(STEPS), "BENCH_BEGUN": "begun", "BENCH_MEASURED": "measured.json"}
    with Job(contender, WORKERS, (str(SCRIPTS / "steps.py"),), env=env) as job:
        try:
            begun, measured = job.folder / "begun", job.folder / "measured.json"
            job.wait_for(lambda: begun.exists() or None, "the first steps are made", _LIMIT_S)
            family = family_of(job.process.pid, ours=True)
            pids = [job.process.pid, *(pid for kind, pids in family.items() if kind != WORKER for pid in pids)]
            before_s = sum(map(cpu_time_s, pids))
            job.wait_for(lambda: measured.exists() or None, "all steps are made", _LIMIT_S)
            cpu_s = sum(map(cpu_time_s, pids)) - before_s
            found = json.loads(measured.read_text())
        except (Trouble, psutil.Error, OSError, ValueError) as trouble:
            return Sample(SECTION, contender.name, WORKERS, why=str(trouble))
    steps_s = found["steps_s"]
    shares = {PROCESSES: cpu_s / WORKERS, THREADS: found["threads_s"], REPORTS: found["reports_s"]}
    costs = {name: 100 * share_s / sum(steps_s) for name, share_s in shares.items()}
    return Sample(
        SECTION,
        contender.name,
        WORKERS,
        {MEDIAN: median(steps_s), MEAN: fmean(steps_s), **costs, IN_ALL: sum(costs.values())},
    )
