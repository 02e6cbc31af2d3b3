"""`elaunch rehearse`: runs a script without a failure, then with one in each run, and compares the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.command_line import own
from elaunch.launcher.options.options import JobCommand, Options, options_of, words_of
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import Raw, whole
from elaunch.launcher.preflight import check_program
from elaunch.launcher.rehearse import compare
from elaunch.rendezvous.job_spec import ProgramKind

# Between looks at the ranks of a killed agent, and their longest end.
_LOOK_S, _END_S = 0.05, 30.0


@dataclass(frozen=True)
class Moment:
    """A failure: these ranks, or the agent, are killed, at the first such place in `step` or later of one Keeper.

    By default there is none.
    """

    text: str
    ranks: tuple[int, ...] = ()
    at: str = ""
    step: int = 0
    agent: bool = False
    name: str = ""


@dataclass(frozen=True)
class Run:
    """What a run has left; `tail` is the end of its output."""

    code: int
    seconds: float
    has_restarted: bool
    records: compare.Records
    tail: str


def _main(ctx: click.Context) -> int:
    """Run the command. Returns the exit code. Raises UsageError."""
    environ, options = ctx.obj.environ, options_of(ctx)
    check_program(options, environ)
    if options.nnodes[1] > 1 or options.target == "-":
        raise UsageError("rehearse runs a script that is a file, on this node alone: leave --nnodes and - out")
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    # A module is found where the command was typed.
    path = os.pathsep.join(filter(None, [str(Path.cwd()), environ.get("PYTHONPATH", "")]))
    steps, links = ctx.params["steps"], ctx.params["link"]
    try:
        return _rehearse(partial(_run, _command(options), {**environ, "PYTHONPATH": path}, links, steps))
    except KeyboardInterrupt:
        _say("interrupted; the job is ended, and its folder is removed")
        return 130


def _link(raw: Raw) -> Path:
    path = Path(str(raw)).absolute()
    if not path.exists():
        raise ValueError("is no file or folder")
    return path


COMMAND = JobCommand(
    "rehearse",
    _main,
    [
        own("steps", "N", "end each run after this step of the Keeper [40]", partial(whole, low=4), default=40),
        own("link", "PATH", "a link to this file or folder is in the run's folder", _link, multiple=True),
    ],
    usage=["[--steps N] [--link PATH] [options of a job] script.py args…"],
    about="""\
What does a failure cost this script, and does it change the result? The script runs twice alone, and then with one
failure in each run: a rank dies after its backward pass, within the commit, in an evaluation; all ranks; the agent.

The script must enter a Keeper. Each run ends after N steps. Losses, inputs and the state of each step and rank are
compared bit for bit, and at the end the script's own tensors.""",
    ending="""\
Each run has an empty folder of its own, which is removed, also for the Keeper's checkpoints. What the script writes to
other absolute paths it writes there in each run. Start a script called rehearse with elaunch ./rehearse.

Exit codes: 0 equal, 1 something differs or nothing could be compared, 2 the command line is wrong.""",
)
_FILES = {option.name for option in TABLE if option.metavar == "FILE"}


def _command(options: Options) -> list[str]:
    """The job's options and program, for another folder."""
    typed = {name: _absolute(value) if name in _FILES else value for name, value in options.typed.items()}
    # The job file may say what the program is.
    kind = {ProgramKind.MODULE: {"module": "on"}, ProgramKind.COMMAND: {"no_python": "on"}}.get(options.kind, {})
    target = options.target if options.kind is ProgramKind.MODULE else _absolute(options.target)
    return [*words_of({**typed, **kind, "log_dir": "../logs"}, []), "--", target, *options.args]


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path


def _rehearse(run: Callable[[Moment], Run]) -> int:
    """Do all runs and print the comparison. Returns the exit code."""
    alone = run(Moment("left alone"))
    again = alone if alone.code else run(Moment("left alone, once more"))
    if refusal := _refusal(alone, again):
        print(refusal)
        return 1
    name, steps = max(
        ((of, compare.steps_done(alone.records, of)) for of, _ in alone.records), key=lambda found: found[1]
    )
    right, warned = compare.alike(alone.records, again.records), dict[str, None]()
    table, bad, reasons = [("failure", "result", "repeated", "lost")], [], dict[str, None]()
    for moment in _moments(name, steps, {rank: its for (of, rank), its in alone.records.items() if of == name}):
        its = run(moment)
        warned |= dict.fromkeys(text for records in its.records.values() for each in records for text in each["warned"])
        if its.code:
            result, what, reason = "FAILED", f"exit code {its.code}\n{its.tail}", ""
        elif not its.has_restarted:
            result, what, reason = "none", "the script ended before the failure came", ""
        else:
            what, reason = compare.difference(right, its.records)
            result = "DIFFERS" if what else "equal"
        lost_s = max(0, its.seconds - min(alone.seconds, again.seconds))
        table.append((moment.text, result, f"{compare.repeated(its.records)} steps", f"{lost_s:.1f} s"))
        bad += [f"{moment.text}: {what}"] if what else []
        reasons |= {f"likely reason: {reason}": None} if reason else {}
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table))
    ranks = len({rank for _, rank in alone.records})
    print(
        f"compared: bit for bit, {steps} steps of {ranks} rank{'s' * (ranks > 1)}: losses, inputs, evaluations, state"
    )
    print("\n".join([*bad, *(f"the Keeper's warning: {text}" for text in warned), *reasons]))
    print("a failure changes the result" if bad else "equal: no failure has changed what was compared")
    return 1 if bad else 0


def _refusal(alone: Run, again: Run) -> str:
    """Why there is nothing that a failure could change, or ""."""
    if again.code:
        why = f"the script fails although nothing was killed (exit code {again.code})"
        return f"{again.tail}\n{why}. If it lacks a file of the folder where you start it, give --link PATH"
    if not any(compare.steps_done(alone.records, name) for name, _ in alone.records):
        return "the script does no step of a Keeper: there is nothing to compare"
    if found := compare.difference(compare.computed(alone.records), again.records)[0]:
        return f"two runs without a failure differ: set all seeds, and leave out what depends on time\n{found}"
    return ""


def _moments(name: str, steps: int, its: Mapping[int, Sequence[compare.Record]]) -> list[Moment]:
    """The failures to come, each at another place of the run of the ranks in `its`."""
    first, last = min(its), max(its)
    third, half, late = (max(1, steps * n // 6) for n in (2, 3, 4))
    found = [
        Moment(f"rank {last}, after a backward pass of step {half}", (last,), "backward", half),
        Moment(f"rank {last}, within the commit of step {third}", (last,), "commit", third),
    ]
    if evaluated := [each["step"] - 1 for each in its[last] if not {*compare.EVALUATIONS}.isdisjoint(each["facts"])]:
        step = evaluated[len(evaluated) // 2]
        found.append(Moment(f"rank {last}, in the evaluation of step {step}", (last,), "evaluation", step))
    if len(its) > 1:
        found.append(Moment(f"all ranks, in step {late}", (*its,), "backward", late))
    found.append(Moment(f"the agent, in step {half}", (first,), "backward", half, agent=True))
    return [replace(each, name=name) for each in found]


def _run(words: list[str], environ: Mapping[str, str], links: Sequence[Path], steps: int, moment: Moment) -> Run:
    """One run to its end, in a folder that is removed. If its agent is killed, the same command is typed again."""
    _say(moment.text)
    with tempfile.TemporaryDirectory(prefix="elaunch_rehearse_", ignore_cleanup_errors=True) as name:
        folder, begin_s = Path(name), time.monotonic()
        (folder / "work").mkdir()
        for link in links:
            (folder / "work" / link.name).symlink_to(link)
        code = -signal.SIGKILL
        for its in (moment, *([Moment("the same command again")] if moment.agent else [])):
            if code == -signal.SIGKILL:
                asked = json.dumps({**asdict(its), "folder": name, "steps": steps})
                # What a killed rank leaves in the temporary folder, as multiprocessing's, is removed too. A warm fork
                # server would stay with this folder.
                own = {"ELAUNCH_REHEARSAL": asked, "TMPDIR": name, "ELAUNCH_WARM": "0"}
                # A script that fails alone fails at once.
                quiet = [] if its.ranks else ["--max-restarts=0"]
                code = _job([*quiet, *words], {**environ, **own}, folder)
        output = (folder / "output").read_text(errors="replace").splitlines()
        return Run(
            code=code,
            seconds=time.monotonic() - begin_s,
            has_restarted=len([*folder.glob("logs/2*/attempt_*")]) > 1,
            records=_records(folder),
            # Paths in the folder are gone when they are read.
            tail="\n".join([line for line in output if name not in line][-30:]),
        )


def _job(words: list[str], environ: Mapping[str, str], folder: Path) -> int:
    """Run the job to its end. Returns the exit code."""
    with (folder / "output").open("ab") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "elaunch", *words],
            cwd=folder / "work",
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (folder / "agent.pid").write_text(str(job.pid))
    try:
        return job.wait()
    finally:
        if job.returncode is None:
            job.terminate()
            job.wait()
        # The guardian ends the ranks of a killed agent.
        end_s, pids = time.monotonic() + _END_S, {each["pid"] for its in _records(folder).values() for each in its}
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)


def _records(folder: Path) -> compare.Records:
    """What each rank of each Keeper has recorded. A process may have been killed while it wrote its last line."""
    found: dict[tuple[str, int], list[compare.Record]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        keeper, _, rank = path.stem.rpartition(".")
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[keeper, int(rank)] = [json.loads(line) for line in whole]
    return {key: its for key, its in found.items() if its}


def _say(text: str) -> None:
    print(f"elaunch: rehearse: {text}", file=sys.stderr, flush=True)
