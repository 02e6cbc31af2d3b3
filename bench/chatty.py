"""How fast the workers' lines come through the launcher."""

from __future__ import annotations

import subprocess
import time

from bench.contenders import Contender
from bench.job import SCRIPTS, Job
from bench.samples import Sample

SECTION = "lines"
RATE = "lines per second"
WORKERS = 2
LINES = 200_000
_BLOCK_BYTES = 1 << 20


def chatty(contender: Contender, lines: int = LINES) -> Sample:
    """Two workers print `lines` lines of 80 characters each; from the first print to the last line at the reader."""
    env = {"BENCH_LINES": str(lines)}
    with Job(contender, WORKERS, (str(SCRIPTS / "chatty.py"),), env=env, stdout=subprocess.PIPE) as job:
        seen, last_s = 0, 0.0
        while data := job.stdout.read1(_BLOCK_BYTES):  # type: ignore[attr-defined]
            # A block may end within the word; what it says of a line is its end.
            seen += data.count(b".\n")
            last_s = time.monotonic()
        printing_s = [stamp.monotonic_s for stamp in job.stamps()]
        if seen != WORKERS * lines or len(printing_s) != WORKERS:
            return Sample(SECTION, contender.name, WORKERS, why=f"{seen} of {WORKERS * lines} lines came")
        return Sample(SECTION, contender.name, WORKERS, {RATE: seen / (last_s - min(printing_s))})
