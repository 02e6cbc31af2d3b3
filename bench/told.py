"""How soon after a fault the launcher says which rank it was, and whether it names the right one."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace

from bench.contenders import Contender
from bench.job import SCRIPTS, Job, Trouble
from bench.samples import Sample
from bench.stamps import all_at_s, at

SECTION = "told"
WORKERS = 4
RIGHT = "names the right rank"
# How a rank fails, as scripts/fault.py knows it.
KILLED, EXCEPTION, SEGFAULT, EXIT_0 = "killed", "exception", "segfault", "exit 0"
HOWS = (KILLED, EXCEPTION, SEGFAULT, EXIT_0)
# A rank that does not fail but loops, where --hang-after is short. Only elaunch says so by itself.
HANG_AFTER_S = 5
HUNG = f"endless loop, --hang-after {HANG_AFTER_S}"
_START_LIMIT_S = 120.0
_LOOK_S = 0.002
# What each launcher says of one failed rank, on its stderr. A line about a lost peer names no cause.
OURS = re.compile(
    r"elaunch: (?:the cause: |the job seems to hang: )?rank (?P<rank>\d+) (?:\(|on |runs )(?!.* lost a peer ).*$",
    re.MULTILINE,
)
_TORCHRUNS = re.compile(r"failed \(exitcode: .*\) local_rank: (?P<rank>\d+) ", re.MULTILINE)


def told(contender: Contender, how: str, limit_s: float, rng: random.Random) -> Iterator[Sample]:
    """One job in which a random rank fails like that. Its sample has the time until the launcher's sentence."""
    rank = rng.randrange(WORKERS)
    options = ("--hang-after", str(HANG_AFTER_S)) if how == HUNG else ()
    job_of = replace(contender, options=(*contender.options, *options))
    try:
        with Job(job_of, WORKERS, (str(SCRIPTS / "fault.py"),), env={"BENCH_FAULT": "fault"}) as job:
            job.wait_for(lambda: all_at_s(job.stamps(), 0, "training", WORKERS), "all were training", _START_LIMIT_S)
            time.sleep(rng.uniform(0, 0.3))
            partial = job.folder / "fault.new"
            partial.write_text(f"{rank} {how}")
            partial.rename(job.folder / "fault")
            told_s, named = _wait_until_told(job, limit_s)
            failed_s = at(job.stamps(), 0, "fault")[rank].monotonic_s
        yield Sample(
            SECTION, contender.name, WORKERS, {how: told_s - failed_s, f"{how}: {RIGHT}": float(named == rank)}
        )
    except (Trouble, KeyError) as trouble:
        yield Sample(SECTION, contender.name, WORKERS, why=f"{how}: {trouble}")


def _wait_until_told(job: Job, limit_s: float) -> tuple[float, int]:
    """When the launcher named a rank, and which. The log is read often, so that the look adds little."""
    pattern, end_s = OURS if job.contender.ours else _TORCHRUNS, time.monotonic() + limit_s
    while True:
        has_ended = job.process.poll() is not None
        found = pattern.search((job.folder / "log.txt").read_text(errors="replace"))
        if found:
            return time.monotonic(), int(found["rank"])
        if has_ended or time.monotonic() > end_s:
            raise Trouble("the launcher named no rank")
        time.sleep(_LOOK_S)
