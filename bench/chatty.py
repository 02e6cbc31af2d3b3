"""How many lines per second the launcher passes on from its workers."""

from __future__ import annotations

import re
import subprocess
import time

from bench.contenders import Contender
from bench.job import SCRIPTS, Job
from bench.samples import Sample

SECTION = "lines"
RATE = "lines per second"
TORN = "lines cut by another worker's"
WORKERS = 2
LINES = 200_000
_BLOCK_BYTES = 1 << 20
# With the prefix of elaunch, or of torchrun --tee.
_WHOLE = re.compile(rb"^(?:\[\d\] |\[default\d\]:)?chatty worker \d \.+$", re.MULTILINE)


def chatty(contender: Contender, lines: int = LINES) -> Sample:
    """Two workers print `lines` lines of 80 characters each. The time is from the first print to the last line read."""
    env = {"BENCH_LINES": str(lines)}
    with Job(contender, WORKERS, (str(SCRIPTS / "chatty.py"),), env=env, stdout=subprocess.PIPE) as job:
        # The lines are counted afterwards: a reader that counts lines is slower than the launcher.
        blocks, last_s = [], 0.0
        while data := job.stdout.read1(_BLOCK_BYTES):  # type: ignore[attr-defined]
            blocks.append(data)
            last_s = time.monotonic()
        printing_s = [stamp.monotonic_s for stamp in job.stamps()]
    ends, whole = counted(b"".join(blocks))
    if ends != WORKERS * lines or len(printing_s) != WORKERS:
        return Sample(SECTION, contender.name, WORKERS, why=f"{ends} of {WORKERS * lines} lines came")
    values = {RATE: ends / (last_s - min(printing_s)), TORN: ends - whole}
    return Sample(SECTION, contender.name, WORKERS, values)


def counted(output: bytes) -> tuple[int, int]:
    """How many lines there are, and how many of them are whole."""
    return output.count(b"\n"), len(_WHOLE.findall(output))
