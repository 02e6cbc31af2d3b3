"""Runs many programs by two launches: a launch costs a hundred times what a fork does.

The programs are in one script, each below a condition of its own. Programs that succeed are the ranks of one job.
Programs that fail are the generations of another job, with one worker. Each is compared with a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.fidelity.ways import End, fresh
from tests.harness import DEADLINE_S, Job, environment, script

# Finds the program to run: a single worker has rank 0, and many ranks have only generation 0, so the sum is the index.
# It reports progress, since a program that fails without progress is not started again. A program that execs itself has
# done so before.
WHOSE = """
import os
if "TURN" not in os.environ:
    os.environ["TURN"] = os.environ["TURNS"].split()[int(os.environ["RANK"]) + int(os.environ["ELAUNCH_GENERATION"])]
    os.write(int(os.environ["ELAUNCH_LINK"]), b'{"event": "progress", "step": %d}\\n' % int(os.environ["TURN"]))
TURN = int(os.environ["TURN"])
"""


@dataclass(frozen=True)
class Turns:
    """The ends of each program. `logged` is the output of the two jobs."""

    fresh: Mapping[str, End]
    worker: Mapping[str, End]
    logged: str

    def both(self, name: str) -> tuple[End, End]:
        """The worker's end and the fresh interpreter's."""
        assert name in self.worker, (
            f"{name!r} was never a worker's: one of those before it ended otherwise\n{self.logged}"
        )
        return self.worker[name], self.fresh[name]


def taken(folder: Path, how: tuple[str, ...], programs: Mapping[str, str], *args: str) -> Turns:
    """Run all programs with these arguments, as workers and as fresh interpreters.

    The script is `folder`/train.py.
    """
    text = WHOSE + "".join(
        f"{'el' * (turn > 0)}if TURN == {turn}:  # {name}\n{textwrap.indent(program or 'pass', '    ')}\n"
        for turn, (name, program) in enumerate(programs.items())
    )
    script(folder, text)
    # Set two threads for all: the number that the launcher chooses would differ from that of a fresh process.
    common = {"OMP_NUM_THREADS": "2"}

    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(
            lambda turn: fresh(folder, "train.py", *args, env={**common, "TURN": str(turn)}),
            range(len(programs)),
        )
        alone = dict(zip(programs, ends, strict=True))
    names = list(programs)
    well = [name for name in names if alone[name].code == 0]
    ill = [name for name in names if alone[name].code != 0]
    workers: dict[str, End] = {}
    logged = ""
    for group, options in (
        (well, ("--nproc-per-node", str(len(well)), "--max-restarts", "0")),
        (ill, ("--nproc-per-node", "1", "--max-restarts", str(len(ill) - 1))),
    ):
        if not group:
            continue
        logs = folder / f"logs of {len(workers)}"
        order = {"TURNS": " ".join(str(names.index(name)) for name in group), **common}
        words = (*how, *options, "--log-dir", str(logs), "-r", "3", "train.py", *args)
        with Path(os.devnull).open("rb") as typed, Job(folder, *words, env=_own(folder, order), stdin=typed) as job:
            # Those that fail run one after the other.
            job.wait(DEADLINE_S + 10.0 * len(group))
        logged += job.output
        workers.update(_ends(logs, group))
    return Turns(alone, workers, logged)


def _ends(logs: Path, group: list[str]) -> dict[str, End]:
    """How each worker of a job ended, read only from the log folder."""
    run = logs / "latest"
    found = {}
    for line in (run / "timeline.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "exited":
            rank, generation = event["rank"], event["generation"]
            kept = run / f"attempt_{generation}" / str(rank)
            out, err = ((kept / f"{name}.log").read_bytes() for name in ("stdout", "stderr"))
            found[group[rank + generation]] = End(event["code"], out, err)
    return found


def _own(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return environment({"TMPDIR": str(temporary), **env})
