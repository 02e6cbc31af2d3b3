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
from contextlib import suppress
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

# Between looks at the output; the longest end of a killed agent's ranks.
_LOOK_S, _END_S = 0.05, 30.0


@dataclass(frozen=True)
class Moment:
    """A failure: these ranks, or the agent, are killed, at the first such place in `step` or later.

    Without a Keeper it comes after `lines` of output. By default there is none.
    """

    text: str
    ranks: tuple[int, ...] = ()
    at: str = ""
    step: int = 0
    agent: bool = False
    name: str = ""
    lines: int = 0


@dataclass(frozen=True)
class Run:
    """What a run has left; `tail` is the end of its output."""

    code: int
    seconds: float
    has_restarted: bool
    records: compare.Records
    lines: list[str]
    world_size: int
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
        own("steps", "N", "end each run after this step of a Keeper [40]", partial(whole, low=4), default=40),
        own("link", "PATH", "a link to this file or folder is in the run's folder", _link, multiple=True),
    ],
    usage=["[--steps N] [--link PATH] [options of a job] script.py args…"],
    about="""\
What does a failure cost this script, and does it change the result? The script runs twice alone, and then with one
failure in each run: a rank dies after its backward pass, within the commit, in an evaluation; all ranks; the agent.

With a Keeper each run ends after N steps. Losses, inputs and the state of each step and rank are compared bit for bit,
and at the end the script's own tensors. Without a Keeper each run goes to the script's own end, so give it arguments
for a short run. A rank and the agent are killed in the middle of its output, and its lines are compared.""",
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
    lines = compare.stable(alone.lines, again.lines)
    if refusal := _refusal(alone, again, lines):
        print(refusal)
        return 1
    right, warned = compare.alike(alone.records, again.records), dict[str, None]()
    table, bad, reasons = [("failure", "result", "repeated", "lost")], [], dict[str, None]()
    for moment in _moments(alone):
        its = run(moment)
        warned |= dict.fromkeys(text for records in its.records.values() for each in records for text in each["warned"])
        if its.code:
            result, what, reason = "FAILED", f"exit code {its.code}\n{its.tail}", ""
        elif not its.has_restarted:
            result, what, reason = "none", "the script ended before the failure came", ""
        else:
            what, reason = _difference(right, lines, its)
            result = "DIFFERS" if what else "equal"
        count = compare.repeated(its.records) if right else max(0, len(its.lines) - len(alone.lines))
        lost_s = max(0, its.seconds - min(alone.seconds, again.seconds))
        table.append((moment.text, result, f"{count} {'steps' if right else 'lines'}", f"{lost_s:.1f} s"))
        bad += [f"{moment.text}: {what}"] if what else []
        reasons |= {f"likely reason: {reason}": None} if reason else {}
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table))
    steps = max(compare.steps_done(alone.records, name) for name, _ in alone.records) if right else 0
    ranks = f"{alone.world_size} rank{'s' * (alone.world_size > 1)}"
    compared = f"bit for bit, {steps} steps of {ranks}: losses, inputs, evaluations, state, the script's own tensors"
    if not right:
        compared = f"{len(lines)} lines of output, but for words that differ in two quiet runs. No Keeper was entered"
    print("\n".join([f"compared: {compared}", *bad, *(f"the Keeper's warning: {text}" for text in warned), *reasons]))
    print("a failure changes the result" if bad else "equal: no failure has changed what was compared")
    return 1 if bad else 0


def _difference(right: compare.Values, lines: Sequence[str], its: Run) -> tuple[str, str]:
    """In what a run differs from those without a failure, and the likely reason; empty if in nothing."""
    if right:
        return compare.difference(right, its.records)
    if missing := compare.missing(lines, its.lines):
        reason = "its checkpoint lacks something (optimizer, scheduler, random states, position in the data)"
        return f"{len(missing)} lines are missing, the first is: {missing[0]}", reason
    return "", ""


def _refusal(alone: Run, again: Run, lines: Sequence[str]) -> str:
    """Why there is nothing that a failure could change, or ""."""
    if again.code:
        why = f"the script fails although nothing was killed (exit code {again.code})"
        return f"{again.tail}\n{why}. If it lacks a file of the folder where you start it, give --link PATH"
    if found := compare.difference(compare.computed(alone.records), again.records)[0]:
        return f"two runs without a failure differ: set all seeds, and leave out what depends on time\n{found}"
    if alone.records and not max(compare.steps_done(alone.records, name) for name, _ in alone.records):
        return "a Keeper was entered, and no step was done: there is nothing to rehearse"
    if not alone.records and not lines:
        return "the script enters no Keeper, and prints no line that is alike in two runs: let it print its losses"
    return ""


def _moments(alone: Run) -> list[Moment]:
    """The failures to come, each at another place of the run."""
    records, last = alone.records, alone.world_size - 1
    if not records:
        lines = max(1, len(alone.lines) // 2)
        where = f"after line {lines} of the output"
        killed = Moment(f"rank {last}, {where}", (last,), lines=lines)
        return [killed, Moment(f"the agent, {where}", agent=True, lines=lines)]
    name = max(records, key=lambda key: compare.steps_done(records, key[0]))[0]
    its = {rank: found for (of, rank), found in records.items() if of == name}
    steps, first, last = compare.steps_done(records, name), min(its), max(its)
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
                code = _job(words, {**environ, **own}, folder, its)
        records = {path.stem.rpartition("."): _json_lines(path) for path in sorted(folder.glob("*.jsonl"))}
        output = (folder / "output").read_text(errors="replace").splitlines()
        return Run(
            code=code,
            seconds=time.monotonic() - begin_s,
            has_restarted=len([*folder.glob("logs/2*/attempt_*")]) > 1,
            records={(keeper, int(rank)): found for (keeper, _, rank), found in records.items() if found},
            lines=_lines(folder),
            world_size=len(_pids(folder)),
            # Paths in the folder are gone when they are read.
            tail="\n".join([line for line in output if name not in line][-30:]),
        )


def _job(words: list[str], environ: Mapping[str, str], folder: Path, moment: Moment) -> int:
    """Start the job, and without a Keeper kill what is to be killed. Returns the exit code."""
    # A script that fails alone fails at once.
    quiet = [] if moment.ranks or moment.agent else ["--max-restarts=0"]
    with (folder / "output").open("ab") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "elaunch", *quiet, *words],
            cwd=folder / "work",
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (folder / "agent.pid").write_text(str(job.pid))
    is_due = bool(moment.lines)
    try:
        while job.poll() is None:
            time.sleep(_LOOK_S)
            if is_due and len(_lines(folder)) >= moment.lines and {*moment.ranks} <= _pids(folder).keys():
                is_due = False
                # It may have ended a moment ago.
                with suppress(ProcessLookupError):
                    os.kill(job.pid if moment.agent else _pids(folder)[moment.ranks[0]], signal.SIGKILL)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
        # The guardian ends the ranks of a killed agent.
        end_s, pids = time.monotonic() + _END_S, _pids(folder).values()
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
    return job.returncode


def _pids(folder: Path) -> dict[int, int]:
    """The processes of the ranks that were started last."""
    events = [each for path in sorted(folder.glob("logs/2*/timeline.jsonl")) for each in _json_lines(path)]
    return {each["rank"]: each["pid"] for each in events if each["event"] == "forked"}


def _lines(folder: Path) -> list[str]:
    """What all ranks have printed."""
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("logs/2*/attempt_*/*/std*.log"))]
    return [line for text in texts for line in text.replace("\r", "\n").splitlines() if line.strip()]


def _json_lines(path: Path) -> list[compare.Record]:
    """The lines that are whole: a process may have been killed while it wrote."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _say(text: str) -> None:
    print(f"elaunch: rehearse: {text}", file=sys.stderr, flush=True)
