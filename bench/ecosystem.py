"""`python -m bench.ecosystem`: how fast programs of other libraries start, and train again after a SIGKILL.

The programs are those of tests/ecosystem, elaunch and torchrun take turns. Run it in the environment of
`make ecosystem`: `.venv-ecosystem/bin/python -m bench.ecosystem --n 5`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bench.samples import percentile
from tests.ecosystem.registry import Program, named
from tests.ecosystem.runs import LAUNCHERS, Place, first_steps
from tests.harness import wait_for

DEFAULT = "with_lightning,with_fabric,with_accelerate,with_transformers,without_torch"
_LIMIT_S = 120.0
# Each generation makes them anew, in five minutes.
_LONG = "10000"
_COLUMNS = ("program", "launcher", "start → step", "kill → step", "the first kill", "ended")


@dataclass
class Found:
    """Seconds of one program under one launcher, to the first step of all ranks."""

    starts_s: list[float] = field(default_factory=list)
    first_kill_s: list[float] = field(default_factory=list)
    kills_s: list[float] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def measure(program: Program, launcher: str, folder: Path, kills: int, dice: random.Random, found: Found) -> None:
    """One turn: a start, and kills."""
    folder.mkdir(parents=True)
    place = Place(folder, program)
    before: set[int] = set()
    started_s = time.monotonic()
    job = place.job("--max-restarts", str(kills + 2), launcher=launcher, env={"PROGRAM_STEPS": _LONG})

    def first_step_s() -> float:
        """When the last rank of the newest generation ended its first step. AssertionError if the job ends before."""

        def stepped() -> float | None:
            steps = first_steps(job, sorted(before))
            is_whole = len(steps) == program.ranks
            assert is_whole or job.process.poll() is None, "the job ended"
            return max(step.at_s for step in steps.values()) if is_whole else None

        return wait_for(stepped, "a first step of each rank", _LIMIT_S, every_s=0.01) or 0.0

    try:
        with job:
            found.starts_s.append(first_step_s() - started_s)
            for number in range(kills):
                pids = [step.pid for step in first_steps(job, sorted(before)).values()]
                time.sleep(0.3 + dice.random() / 2)
                before.update(pids)
                killed_s = time.monotonic()
                os.kill(dice.choice(pids), signal.SIGKILL)
                (found.kills_s if number else found.first_kill_s).append(first_step_s() - killed_s)
    except AssertionError as error:
        found.ended.append(str(error).splitlines()[0])
    finally:
        place.remove()


def require(modules: Iterable[str]) -> None:
    """End this process with a sentence if one of `modules` is not installed."""
    packages = {name.partition(".")[0] for name in modules}
    if missing := sorted(name for name in packages if find_spec(name) is None):
        sys.exit(
            f"bench.ecosystem needs {' and '.join(missing)}, not installed in {sys.prefix}: `make"
            " .venv-ecosystem/.installed` makes an environment with it, and `.venv-ecosystem/bin/python -m"
            " bench.ecosystem` uses that"
        )


def _shown(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.2f} ({percentile(values, 0.95):.2f}, n = {len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=named, default=named(DEFAULT), help=f"names with commas ({DEFAULT})")
    parser.add_argument("--n", type=int, default=3, help="turns of each program and launcher (3)")
    parser.add_argument("--kills", type=int, default=5, help="kills in each job (5)")
    parser.add_argument("--launchers", default="elaunch,torchrun")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    require(program.imports for program in given.programs)
    dice = random.Random(given.seed)
    launchers = [name for name in given.launchers.split(",") if name in LAUNCHERS]
    print("Seconds: median (95th percentile, number). 2 ranks unless the program has more.")
    print("| " + " | ".join(_COLUMNS) + " |")
    print("| --- | --- |" + " ---: |" * (len(_COLUMNS) - 3) + " --- |")
    for program in given.programs:
        results = {name: Found() for name in launchers}
        with tempfile.TemporaryDirectory(prefix="eco") as name:
            for turn in range(given.n):
                for launcher in launchers:
                    measure(program, launcher, Path(name) / f"{turn}{launcher}", given.kills, dice, results[launcher])
        for launcher, found in results.items():
            figures = (found.starts_s, found.kills_s, found.first_kill_s)
            words = (program.name, launcher, *map(_shown, figures), "; ".join(sorted({*found.ended})))
            print("| " + " | ".join(words) + " |", flush=True)


if __name__ == "__main__":
    main()
