"""`elaunch rehearse`: runs a script without a failure, then with one failure per run, and compares the results."""

from __future__ import annotations

import json
import os
import re
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
from elaunch.launcher.inspect.text import aligned
from elaunch.launcher.options.command_line import Option
from elaunch.launcher.options.options import JobCommand, Options, argv_of, options_of
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import Raw, whole
from elaunch.launcher.preflight import check_program
from elaunch.launcher.rehearse import compare
from elaunch.rendezvous.types import ProgramKind

# The poll interval of the output; the longest shutdown of a killed agent's ranks.
_POLL_S, _END_S = 0.05, 30.0
# A line without a digit, such as "done", shows no result.
_NUMBER = re.compile("[0-9]")


@dataclass(frozen=True)
class Fault:
    """A fault to inject: these ranks, or the agent, are killed, at the first `at` in `step` or later.

    Without a Keeper they are killed after `lines` lines of output. By default there is no fault.
    """

    text: str
    ranks: tuple[int, ...] = ()
    at: str = ""
    step: int = 0
    agent: bool = False
    lines: int = 0


@dataclass(frozen=True)
class Run:
    """The results of a run; `tail` is the end of its output."""

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
        click.echo("elaunch: rehearse: interrupted; the job is ended, and its folder is removed", err=True)
        return 130


def _command(options: Options) -> list[str]:
    """The job's options and program, for a run in another folder."""
    files = {option.name for option in TABLE if option.metavar == "FILE"}
    typed = {name: _absolute(value) if name in files else value for name, value in options.typed.items()}
    # The job file may name the type of the program.
    kind = {ProgramKind.MODULE: {"module": "on"}, ProgramKind.COMMAND: {"no_python": "on"}}.get(options.kind, {})
    target = options.target if options.kind is ProgramKind.MODULE else _absolute(options.target)
    return [*argv_of({**typed, **kind, "log_dir": "../logs"}, []), "--", target, *options.args]


def _absolute(path: Raw) -> str:
    """The absolute path of what exists; other text unchanged."""
    return str(Path(str(path)).absolute()) if Path(str(path)).exists() else str(path)


def _link(path: Raw) -> str:
    if not Path(str(path)).exists():
        raise ValueError("is no file or folder")
    return _absolute(path)


COMMAND = JobCommand(
    "rehearse",
    _main,
    [
        Option("steps", "N", "end each run after this step of a Keeper [40]", partial(whole, low=4), default=40),
        Option("link", "PATH", "link this file or folder into each run's folder", _link, multiple=True),
    ],
    usage=["[--steps N] [--link PATH] [options of a job] script.py args…"],
    about="""\
What does a failure cost this script, and does it change the result? The script runs twice undisturbed, and then with
one failure in each run: a rank dies after its backward pass, within the commit, in an evaluation; all ranks; the agent.

With a Keeper each run ends after N steps, and losses, inputs, the state of each step and the script's own tensors are
compared bit for bit. Without a Keeper each run goes to the script's own end, and its lines are compared.""",
    ending="""\
Each run has an empty folder of its own, also for the Keeper's checkpoints, which is removed. Exit codes: 0 equal,
1 something differs or nothing could be compared, 2 the command line is wrong.""",
)


def _rehearse(run: Callable[[Fault], Run]) -> int:
    """Do all runs and print the comparison. Returns the exit code."""
    alone = run(Fault("no failure"))
    again = alone if alone.code else run(Fault("no failure, once more"))
    right, lines = compare.alike(alone.records, again.records), [line for line in alone.lines if line in again.lines]
    if refusal := _refusal(alone, again, right, lines):
        print(refusal)
        return 1
    # The dictionary's keys show each reason once.
    table, bad, reasons = [("failure", "result", "repeated", "lost")], list[str](), dict[str, None]()
    for fault in _faults(alone):
        its = run(fault)
        result, what, reason = _result(right, lines, its)
        bad += [f"{fault.text}: {what}"] if what else []
        reasons |= {f"likely reason: {reason}": None} if reason else {}
        count = compare.repeated(its.records) if right else max(0, len(its.lines) - len(alone.lines))
        lost_s = max(0, its.seconds - min(alone.seconds, again.seconds))
        table.append((fault.text, result, f"{count} {'steps' if right else 'lines'}", f"{lost_s:.1f} s"))
    print("\n".join(aligned(table)))
    compared = (
        f"{len(lines)} of {len(alone.lines)} lines of output, alike in two fault-free runs. No Keeper was entered"
    )
    if right:
        compared = (
            f"bit for bit, {compare.steps_done(alone.records)} steps of {alone.world_size} ranks,"
            f" {sum(map(len, right.values()))} values: losses, inputs, evaluations, state, the script's own tensors"
        )
    print("\n".join([f"compared: {compared}", *bad, *reasons]))
    print("a failure changes the result" if bad else "equal: no failure has changed what was compared")
    return 1 if bad else 0


def _refusal(alone: Run, again: Run, right: compare.Values, lines: Sequence[str]) -> str:
    """Why nothing can be compared, or ""."""
    if again.code:
        why = f"the script fails although nothing was killed (exit code {again.code})"
        return f"{again.tail}\n{why}. If it lacks a file of the folder where you start it, give --link PATH"
    if found := compare.difference(compare.computed(alone.records), again.records)[0]:
        return f"two runs without a failure differ: set all seeds, and leave out what depends on time\n{found}"
    if alone.records and not compare.steps_done(alone.records):
        return "a Keeper was entered, and no step was done: there is nothing to rehearse"
    if any(right.values()) or (not alone.records and any(map(_NUMBER.search, lines))):
        return ""
    alike = f"of {len(alone.lines)} lines of output {len(lines)} are alike in two runs, and none of these has a number"
    return f"nothing can be compared: {alike}; let it print its losses, without times"


def _result(right: compare.Values, lines: Sequence[str], its: Run) -> tuple[str, str, str]:
    """The result in a word, how the run differs from those without a failure, and the likely reason ("" if equal)."""
    if its.code:
        return "FAILED", f"exit code {its.code}\n{its.tail}", ""
    if not its.has_restarted:
        return "none", "the script ended before the failure came", ""
    what, reason = compare.difference(right, its.records)
    if not right and (missing := [line for line in lines if line not in its.lines]):
        what = f"{len(missing)} lines are missing, the first is: {missing[0]}"
        reason = "its checkpoint lacks something (optimizer, scheduler, random states, position in the data)"
    return "DIFFERS" if what else "equal", what, reason


def _faults(alone: Run) -> list[Fault]:
    """The faults to inject, each at a different point of the run."""
    records, last, half = alone.records, alone.world_size - 1, max(1, len(alone.lines) // 2)
    if not records:
        where = f"after line {half} of the output"
        killed = Fault(f"rank {last}, {where}", (last,), lines=half)
        return [killed, Fault(f"the agent, {where}", agent=True, lines=half)]
    ranks = sorted({rank for _, rank in records})
    last = ranks[-1]
    third, half, late = (max(1, compare.steps_done(records) * n // 6) for n in (2, 3, 4))
    found = [
        Fault(f"rank {last}, after a backward pass of step {half}", (last,), "backward", half),
        Fault(f"rank {last}, within the commit of step {third}", (last,), "commit", third),
    ]
    its = [each for (_, rank), of_rank in records.items() if rank == last for each in of_rank]
    if evaluated := [each["step"] - 1 for each in its if compare.EVALUATIONS & each["facts"].keys()]:
        step = evaluated[len(evaluated) // 2]
        found.append(Fault(f"rank {last}, in the evaluation of step {step}", (last,), "evaluation", step))
    if last > 0:
        found.append(Fault(f"all ranks, in step {late}", (*ranks,), "backward", late))
    return [*found, Fault(f"the agent, in step {half}", (ranks[0],), "backward", half, agent=True)]


def _run(argv: list[str], environ: Mapping[str, str], links: Sequence[str], steps: int, fault: Fault) -> Run:
    """One complete run, in a temporary folder. If its agent is killed, the same command is started again."""
    click.echo(f"elaunch: rehearse: {fault.text}", err=True)
    with tempfile.TemporaryDirectory(prefix="elaunch_rehearse_", ignore_cleanup_errors=True) as name:
        folder, begin_s = Path(name), time.monotonic()
        (folder / "work").mkdir()
        for link in links:
            (folder / "work" / Path(link).name).symlink_to(link)
        # What a killed rank leaves in TMPDIR, such as multiprocessing's sockets, is removed too. A warm fork server
        # would outlive this folder.
        environ = {**environ, "TMPDIR": name, "ELAUNCH_WARM": "0"}
        code = _job(argv, environ, folder, steps, fault)
        if fault.agent and code == -signal.SIGKILL:
            code = _job(argv, environ, folder, steps, Fault("the same command again"))
        stems = {path: path.stem.rpartition(".") for path in sorted(folder.glob("*.jsonl"))}
        return Run(
            code=code,
            seconds=time.monotonic() - begin_s,
            has_restarted=len([*folder.glob("logs/2*/attempt_*")]) > 1,
            records={(keeper, int(rank)): found for path, (keeper, _, rank) in stems.items() if (found := _json(path))},
            lines=_lines(folder),
            world_size=len(_pids(folder)),
            tail="\n".join((folder / "output").read_text(errors="replace").splitlines()[-30:]),
        )


def _job(argv: list[str], environ: Mapping[str, str], folder: Path, steps: int, fault: Fault) -> int:
    """Run the job, and without a Keeper inject the fault. Returns the exit code."""
    rehearsal = json.dumps({**asdict(fault), "folder": str(folder), "steps": steps})
    with (folder / "output").open("ab") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "elaunch", *argv],
            cwd=folder / "work",
            env={**environ, "ELAUNCH_REHEARSAL": rehearsal},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (folder / "agent.pid").write_text(str(job.pid))
    try:
        while job.poll() is None:
            time.sleep(_POLL_S)
            if fault.lines and len(_lines(folder)) >= fault.lines and {*fault.ranks} <= _pids(folder).keys():
                # It may have just exited.
                with suppress(ProcessLookupError):
                    os.kill(job.pid if fault.agent else _pids(folder)[fault.ranks[0]], signal.SIGKILL)
                fault = replace(fault, lines=0)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
        # The guardian ends the ranks of a killed agent.
        end_s, pids = time.monotonic() + _END_S, _pids(folder).values()
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
    return job.returncode


def _pids(folder: Path) -> dict[int, int]:
    """The pid of each rank's newest process."""
    events = [each for path in sorted(folder.glob("logs/2*/timeline.jsonl")) for each in _json(path)]
    return {each["rank"]: each["pid"] for each in events if each["event"] == "forked"}


def _lines(folder: Path) -> list[str]:
    """The non-blank lines of all ranks' output."""
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("logs/2*/attempt_*/*/std*.log"))]
    return [line for text in texts for line in text.replace("\r", "\n").splitlines() if line.strip()]


def _json(path: Path) -> list[compare.Record]:
    """The records of complete lines: a process may have been killed while it wrote."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
