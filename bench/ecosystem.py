"""`python -m bench.ecosystem`: how fast programs of other libraries start, and train again after a SIGKILL.

The programs are those of tests/ecosystem, elaunch and torchrun take turns. Run it in the environment of
`make ecosystem`: `.venv-ecosystem/bin/python -m bench.ecosystem --n 5`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.libraries import require
from bench.stats import percentile
from tests.ecosystem.registry import FOLDER, Program, named
from tests.ecosystem.runs import LAUNCHERS, Place, first_steps
from tests.harness import Job, wait_for
from tests.warm import own_place

DEFAULT = "with_lightning,with_fabric,with_accelerate,with_transformers,without_torch"
_LIMIT_S = 120.0
_KILLS_PER_JOB = 5
# Each generation makes them anew, in five minutes.
_LONG = "10000"
_COLUMNS = (
    *("program", "launcher", "bare import", "start → imported", "start → step", "second start → step"),
    *("warm start → imported", "kill → step", "the first kill", "ended"),
)


@dataclass
class Found:
    """Seconds of one program under one launcher."""

    # To the first step of all ranks, and to the end of the imports at the top of the program.
    starts_s: list[float] = field(default_factory=list)
    imported_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    # To the end of the same imports, from a fork server that stayed.
    warm_s: list[float] = field(default_factory=list)
    first_kill_s: list[float] = field(default_factory=list)
    kills_s: list[float] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def imports_of(text: str) -> str:
    """The imports at the top of a program, but for those of modules beside it."""
    tops = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    own = {"common", "__future__"}
    kept = [
        ast.unparse(node)
        for node in tops
        if not (isinstance(node, ast.ImportFrom) and (node.level or (node.module or "") in own))
    ]
    return "\n".join(kept)


def with_mark(text: str) -> str:
    """The program with a line after its last import at the top, which says when it ran."""
    last = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
    lines = text.splitlines(keepends=True)
    mark = "import time as _t; print(f'imported at {_t.monotonic():.6f}', flush=True)\n"
    return "".join((*lines[: last.end_lineno], mark, *lines[last.end_lineno :]))


def bare_import_s(program: Program, folder: Path) -> float:
    """The time of a fresh Python that imports what the program imports, to its last import's end."""
    code = imports_of((folder / program.file).read_text()) + "\nimport time; print(time.monotonic())"
    begun_s = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) - begun_s


class _Ranks:
    """The ranks of a job that runs. `started_s` is when its launcher was started."""

    def __init__(self, place: Place, launcher: str, *options: str, has_own_memory: bool = True) -> None:
        self.started_s = time.monotonic()
        env = {"PROGRAM_STEPS": _LONG}
        self.job = place.job(*options, launcher=launcher, env=env, has_own_memory=has_own_memory)
        self._count = place.program.ranks
        self._before: set[int] = set()

    def first_step_s(self) -> float:
        """When the last rank of the newest generation ended its first step. AssertionError if the job ends before."""

        def found() -> float | None:
            steps = first_steps(self.job, sorted(self._before))
            is_whole = len(steps) == self._count
            assert is_whole or self.job.process.poll() is None, "the job ended"
            return max(step.at_s for step in steps.values()) if is_whole else None

        return wait_for(found, "a first step of each rank", _LIMIT_S, every_s=0.01) or 0.0

    def kill(self, dice: random.Random) -> float:
        """Kill a rank. Returns the seconds until the last rank of the next generation has ended a step."""
        pids = [step.pid for step in first_steps(self.job, sorted(self._before)).values()]
        time.sleep(0.3 + dice.random() / 2)
        self._before.update(pids)
        killed_s = time.monotonic()
        os.kill(dice.choice(pids), signal.SIGKILL)
        return self.first_step_s() - killed_s


def _imported_s(job: Job, begun_s: float) -> float:
    found = [float(line.rpartition(" ")[2]) for line in job.stdout.splitlines() if "imported at " in line]
    return max(found, default=begun_s) - begun_s


def measure(
    program: Program,
    launcher: str,
    folder: Path,
    kills: int,
    dice: random.Random,
    found: Found,
    import_bare: Callable[[], None],
) -> None:
    """One turn: a start, kills, and a second start.

    `import_bare` runs before each start. Its end leaves free memory that the host of a virtual machine has not taken
    back yet: the use of other memory may cost a start a second.
    """
    folder.mkdir(parents=True)
    place = Place(folder, program)
    source = place.folder / program.file
    source.write_text(with_mark(source.read_text()))
    options = ("--max-restarts", str(kills + 2))
    try:
        import_bare()
        ranks = _Ranks(place, launcher, *options)
        with ranks.job as job:
            found.starts_s.append(ranks.first_step_s() - ranks.started_s)
            found.imported_s.append(_imported_s(job, ranks.started_s))
            try:
                for number in range(kills):
                    (found.first_kill_s if number == 0 else found.kills_s).append(ranks.kill(dice))
            except AssertionError as error:
                found.ended.append(str(error).splitlines()[0])
        if launcher == "elaunch":
            wait_for(lambda: not job.processes(), "no process of the first job", _LIMIT_S)
            import_bare()
            again = _Ranks(place, launcher, *options)
            with again.job:
                found.again_s.append(again.first_step_s() - again.started_s)
            if program.library != "none":
                # No fork server stays for a program without torch, which starts quickly.
                found.warm_s.append(_warm_s(place))
    finally:
        place.remove()


def _warm_s(place: Place) -> float:
    """A job leaves a fork server; another one starts from it."""
    with own_place(place.temporary / "run"):
        # The next start must have the same variables.
        before = _Ranks(place, "elaunch", "--warm", has_own_memory=False)
        with before.job as job:
            before.first_step_s()
            job.signal(signal.SIGTERM)
            job.wait(_LIMIT_S)
        ranks = _Ranks(place, "elaunch", "--warm", has_own_memory=False)
        with ranks.job as job:
            ranks.first_step_s()
            assert "warm start" in job.stderr, job.stderr
            return _imported_s(job, ranks.started_s)


def _shown(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.2f} ({percentile(values, 0.95):.2f}, n = {len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=named, default=named(DEFAULT), help=f"names with commas ({DEFAULT})")
    parser.add_argument("--n", type=int, default=3, help="turns of each program and launcher (3)")
    parser.add_argument("--kills", type=int, default=_KILLS_PER_JOB, help="kills in each job (5)")
    parser.add_argument("--launchers", default="elaunch,torchrun")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    require("bench.ecosystem", (program.imports for program in given.programs))
    dice = random.Random(given.seed)
    launchers = [name for name in given.launchers.split(",") if name in LAUNCHERS]
    print("Seconds: median (95th percentile, number). 2 ranks unless the program has more.")
    print("| " + " | ".join(_COLUMNS) + " |")
    print("| --- | --- |" + " ---: |" * (len(_COLUMNS) - 3) + " --- |")
    for program in given.programs:
        bare: list[float] = []
        results = {name: Found() for name in launchers}

        def import_bare(program: Program = program, bare: list[float] = bare) -> None:
            bare.append(bare_import_s(program, FOLDER))

        with tempfile.TemporaryDirectory(prefix="eco") as name:
            for turn in range(given.n):
                for launcher in launchers:
                    where = Path(name) / f"{turn}{launcher}"
                    try:
                        measure(program, launcher, where, given.kills, dice, results[launcher], import_bare)
                    except AssertionError as error:
                        results[launcher].ended.append(str(error).splitlines()[0])
        for launcher, found in results.items():
            figures = [bare, found.imported_s, found.starts_s, found.again_s, found.warm_s]
            figures += [found.kills_s, found.first_kill_s]
            words = (program.name, launcher, *map(_shown, figures), "; ".join(sorted({*found.ended})))
            print("| " + " | ".join(words) + " |", flush=True)


if __name__ == "__main__":
    main()
