"""The time of a DDP step under elaunch beside that of the same processes without any launcher.

    python -m bench.ddp_overhead --launches 20 --pairs 5

Both jobs run at the same time, and make their steps in turns: while one computes, the other waits and uses no CPU. So
a slow stretch of the machine affects both. A launch of two jobs has a ratio of its own, by where the kernel puts their
memory: many launches of few turns tell more than few launches of many turns, and the interval is one over launches. The
CPU time of a step is a second measure: what else the machine does changes it less.

`plain` are two processes with torch's variables. elaunch's own processes are there during plain's turns too; what CPU
they use then is measured, and is the most by which they can slow it down.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from bench.contenders import ELAUNCH, environment
from bench.job import SCRIPTS, Job, Trouble
from bench.stats import percentile
from bench.steady import WORKER, cpu_time_s, family_of
from tests.harness import free_ports

WORKERS = 2
# The bar: elaunch may make a step so much longer, as a share.
OVERHEAD_MAX = 0.005
_TURN_LIMIT_S = 120.0
_RESAMPLES = 2000


@dataclass(frozen=True)
class Turn:
    """The mean seconds of a step, and its CPU seconds over all ranks."""

    mean_s: float
    cpu_s: float


@dataclass(frozen=True)
class Pair:
    """One turn of each job, one after the other, and the launcher's CPU share during plain's."""

    elaunch: Turn
    plain: Turn
    launcher_cpu: float

    @property
    def ratio(self) -> float:
        return self.elaunch.mean_s / self.plain.mean_s

    @property
    def cpu_ratio(self) -> float:
        return self.elaunch.cpu_s / self.plain.cpu_s


@dataclass(frozen=True)
class Verdict:
    """The median of the pairs' ratios with its 95 % interval, as shares above 1."""

    pairs: int
    overhead: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.overhead <= OVERHEAD_MAX

    def __str__(self) -> str:
        interval = f"{100 * self.low:+.2f} to {100 * self.high:+.2f} %"
        return f"{100 * self.overhead:+.2f} % (95 % interval of the median over launches: {interval})"


def judge(launches: Sequence[Sequence[float]], seed: int = 0) -> Verdict:
    """The verdict over the ratios of each launch; its interval is a bootstrap's, over launches."""
    rng = random.Random(seed)
    medians = [_median(rng.choices(launches, k=len(launches))) for _ in range(_RESAMPLES)]
    low, high = percentile(medians, 0.025), percentile(medians, 0.975)
    return Verdict(sum(map(len, launches)), _median(launches) - 1, low - 1, high - 1)


def _median(launches: Sequence[Sequence[float]]) -> float:
    return median(ratio for launch in launches for ratio in launch)


class Turns:
    """The FIFOs of one job in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("took", *(f"go-{rank}" for rank in range(WORKERS))):
            os.mkfifo(folder / name)
        # For reading and writing: then it opens before the other end is there.
        self._took = os.open(folder / "took", os.O_RDWR)
        self._go = [os.open(folder / f"go-{rank}", os.O_RDWR) for rank in range(WORKERS)]

    def take(self) -> Turn:
        """Let the job make its steps. Raises Trouble if they do not end."""
        for end in self._go:
            os.write(end, b"g")
        if not select.select([self._took], [], [], _TURN_LIMIT_S)[0]:
            raise Trouble(f"a turn did not end within {_TURN_LIMIT_S:g} s")
        return Turn(**json.loads(os.read(self._took, 4096)))

    def close(self) -> None:
        for end in (self._took, *self._go):
            os.close(end)


@contextmanager
def under_elaunch(steps: int) -> Iterator[tuple[Turns, Job]]:
    """The job under elaunch, ready for turns."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        turns = Turns(Path(folder))
        env = {"BENCH_TURNS": folder, "BENCH_STEPS": str(steps)}
        try:
            with Job(ELAUNCH, WORKERS, (str(SCRIPTS / "ddp_steps.py"),), env=env) as job:
                yield turns, job
        finally:
            turns.close()


@contextmanager
def plain(steps: int) -> Iterator[Turns]:
    """The same processes without a launcher."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder, ExitStack() as stack:
        turns = Turns(Path(folder))
        stack.callback(turns.close)
        common = {
            "BENCH_TURNS": folder,
            "BENCH_STEPS": str(steps),
            "BENCH_STAMPS": f"{folder}/stamps",
            "WORLD_SIZE": str(WORKERS),
            "LOCAL_WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        for rank in range(WORKERS):
            env = environment(os.environ, ELAUNCH, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            # A session each, as elaunch's workers have: the kernel may share the CPUs out by sessions.
            process = subprocess.Popen(
                [sys.executable, "-u", str(SCRIPTS / "ddp_steps.py")], cwd=folder, env=env, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield turns


def launcher_cpu_s(job: Job) -> float:
    """The CPU time of all of elaunch's processes up to now, without the workers."""
    family = family_of(job.process.pid, ours=True)
    pids = [job.process.pid, *(pid for name, pids in family.items() if name != WORKER for pid in pids)]
    return sum(cpu_time_s(pid) for pid in pids)


def measured(pairs: int, steps: int, launch: int) -> list[Pair]:
    """Both jobs once, with `pairs` turns of each. Which of them is started first, and comes first, alternates."""
    found = []
    with ExitStack() as stack:
        theirs = stack.enter_context(plain(steps)) if launch % 2 else None
        ours, job = stack.enter_context(under_elaunch(steps))
        theirs = theirs or stack.enter_context(plain(steps))
        # The first turns make DDP's buckets, and warm the caches.
        for turns in (ours, theirs) * 2:
            turns.take()
        for number in range(pairs):
            ours_first = number % 2 == 0
            first = ours.take() if ours_first else None
            before_s, begun_s = launcher_cpu_s(job), time.monotonic()
            plain_turn = theirs.take()
            launcher_cpu = (launcher_cpu_s(job) - before_s) / (time.monotonic() - begun_s)
            found.append(Pair(first or ours.take(), plain_turn, launcher_cpu))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if the bar holds, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m bench.ddp_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=20, help="how often both jobs are started (20)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of turns for each launch (5)")
    parser.add_argument("--steps", type=int, default=25, help="steps of a turn (25)")
    options = parser.parse_args(argv)
    # As after Ctrl-C: the jobs end, and their folders go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    launches: list[list[Pair]] = []
    for number in range(options.launches):
        launches.append(measured(options.pairs, options.steps, number))
        print(f"launch {number + 1} of {options.launches}", file=sys.stderr, flush=True)
    pairs = [pair for launch in launches for pair in launch]
    wall = judge([[pair.ratio for pair in launch] for launch in launches])
    cpu = judge([[pair.cpu_ratio for pair in launch] for launch in launches])
    turns = f"{options.steps} steps a turn, {wall.pairs} pairs in {options.launches} launches"
    print(f"{WORKERS} workers, gloo, the bundled model (10 MB of state), {turns}")
    print("| | median step | CPU time over all ranks |\n|---|---|---|")
    for name, its in (("elaunch", [pair.elaunch for pair in pairs]), ("plain", [pair.plain for pair in pairs])):
        step_ms, cpu_ms = (1000 * median(getattr(turn, field) for turn in its) for field in ("mean_s", "cpu_s"))
        print(f"| {name} | {step_ms:.2f} ms | {cpu_ms:.2f} ms |")
    print(f"a step under elaunch: {wall}; the bar is {100 * OVERHEAD_MAX:g} %: {'holds' if wall.holds else 'missed'}")
    print(f"its CPU time: {cpu}")
    print(f"elaunch's own processes use {100 * fmean(p.launcher_cpu for p in pairs):.2f} % of a core in plain's turns")
    return 0 if wall.holds else 1


if __name__ == "__main__":
    sys.exit(main())
