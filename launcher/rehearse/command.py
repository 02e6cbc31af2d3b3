"""`elaunch rehearse`: runs a script without a failure, then with one in each run, and compares the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.command_line import own
from elaunch.launcher.options.options import JobCommand, Options, options_of, words_of
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import Raw, whole
from elaunch.launcher.preflight import check_program
from elaunch.launcher.rehearse.compare import EVALUATIONS, Record, difference, repeated, some, steps_done, unprinted
from elaunch.records import asdict, dataclass, replace
from elaunch.rendezvous.job_spec import ProgramKind

_STEPS_MIN = 4
# The longest time of a run beyond five times the first one's, and of the end of a killed agent's ranks; between looks.
_LIMIT_S, _END_S, _LOOK_S = 60.0, 30.0, 0.05


@dataclass(frozen=True)
class Moment:
    """A failure: these ranks, or the agent, are killed, at the first such place in `step` or later.

    Without a Keeper (`at` is "") it comes after `lines` of output.
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
    """The outcome of a run, whose records and logs are in `folder`."""

    folder: Path
    code: int = 0
    seconds: float = 0.0

    def records(self) -> dict[tuple[str, int], list[Record]]:
        """The records by Keeper and rank."""
        paths = {path: path.stem.rpartition(".") for path in sorted(self.folder.glob("*.jsonl"))}
        return {(name, int(rank)): found for path, (name, _, rank) in paths.items() if (found := _json_lines(path))}

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that were started last."""
        events = [each for path in sorted(self.folder.glob("logs/2*/timeline.jsonl")) for each in _json_lines(path)]
        return {each["rank"]: each["pid"] for each in events if each["event"] == "forked"}

    def lines(self) -> list[str]:
        """What all ranks have printed."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("logs/2*/attempt_*/*/std*.log"))]
        return [line for text in texts for line in text.replace("\r", "\n").splitlines() if line.strip()]

    def trouble(self, *, was_killed: bool) -> str:
        """Why the run is inconclusive, or "". `was_killed` is for a run that was to have a failure."""
        has_restarted = len([*self.folder.glob("logs/2*/attempt_*")]) > 1
        if not self.code and (has_restarted or not was_killed):
            return ""
        tail = (self.folder / "output").read_text(errors="replace").splitlines()[-20:]
        when = ", before the failure came" if was_killed and not has_restarted else ""
        return "\n".join([f"the job ended with exit code {self.code}{when}", *tail])


def _main(ctx: click.Context) -> int:
    """Run the command. Returns the exit code. Raises UsageError."""
    environ, options = ctx.obj.environ, options_of(ctx)
    check_program(options, environ)
    if options.nnodes[1] > 1 or options.target == "-":
        raise UsageError("rehearse runs a script that is a file, on this node alone: leave --nnodes and - out")
    # A module is found where the command was typed.
    path = os.pathsep.join(filter(None, [str(Path.cwd()), environ.get("PYTHONPATH", "")]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    steps, links = ctx.params["steps"], ctx.params["link"]
    with tempfile.TemporaryDirectory(prefix="elaunch_rehearse_", ignore_cleanup_errors=True) as folder:
        jobs = _Jobs(Path(folder), _command(options), {**environ, "PYTHONPATH": path}, steps, links)
        try:
            return _rehearse(jobs)
        except KeyboardInterrupt:
            _say("interrupted; the job is ended, and its folder is removed")
            return 130


def _steps(raw: Raw) -> int:
    return whole(raw, low=_STEPS_MIN)


def _link(raw: Raw) -> Path:
    path = Path(str(raw)).absolute()
    if not path.exists():
        raise ValueError("is no file or folder")
    return path


COMMAND = JobCommand(
    "rehearse",
    _main,
    [
        own("steps", "N", "end each run after this step of a Keeper [40]", _steps, default=40),
        own(
            "link",
            "PATH",
            "a link to this file or folder is in the run's folder, for a script that reads it there",
            _link,
            multiple=True,
        ),
    ],
    usage=["[--steps N] [--link PATH] [options of a job] script.py args…"],
    about="""\
What does a failure cost this script, and does it change the result? The script runs twice alone, and then with one
failure in each run: a rank dies after its backward pass, within the commit, in an evaluation; all ranks; the agent.

With a Keeper each run ends after N steps. Losses, inputs and the state of each step and rank are compared bit for bit.
Without one each run goes to the script's own end, so give it arguments for a short run. A rank and the agent are
killed in the middle of its output, and its lines are compared.""",
    ending="""\
Each run has an empty folder of its own, which is removed. The Keeper's checkpoints go there too, wherever the script
puts them. A script that writes other files to absolute paths would write to the same ones in each run.

Exit codes: 0 nothing differs, 1 something does or the script fails, 2 the command line is wrong.""",
)
_FILES = {option.name for option in TABLE if option.metavar == "FILE"}


def _command(options: Options) -> list[str]:
    """The job's command, for another folder."""
    typed = {name: _absolute(value) if name in _FILES else value for name, value in options.typed.items()}
    # The job file may say what the program is.
    kind = {ProgramKind.MODULE: {"module": "on"}, ProgramKind.COMMAND: {"no_python": "on"}}.get(options.kind, {})
    target = options.target if options.kind is ProgramKind.MODULE else _absolute(options.target)
    words = words_of({**typed, **kind, "log_dir": "../logs"}, [])
    return [sys.executable, "-m", "elaunch", *words, "--", target, *options.args]


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path


def _rehearse(jobs: _Jobs) -> int:
    """Do all runs and print the comparison. Returns the exit code."""
    alone = jobs.run(Moment("left alone"))
    again = alone if alone.code else jobs.run(Moment("left alone, once more"))
    records, lines = alone.records(), alone.lines()
    refusal = ""
    if trouble := again.trouble(was_killed=False):
        refusal = f"{trouble}\nThe script fails although nothing was killed. If it lacks a file that it reads from the "
        refusal += "folder where it starts, give --link PATH"
    elif records and (found := difference(records, again.records(), again.records())):
        refusal = "two runs without a failure differ, so there is no baseline; set all seeds\n"
        refusal += found.partition("\n")[0]
    elif records and not steps_done(records, next(iter(records))[0]):
        refusal = "a Keeper was entered, and no step was done: there is nothing to rehearse"
    elif not records and not lines:
        refusal = "the script enters no Keeper and prints nothing: let it print a line for each step"
    if refusal:
        print(refusal)
        return 1
    table, bad = [("failure", "result", "repeated", "lost")], []
    for moment in _moments(alone):
        run = jobs.run(moment)
        printed = run.lines()
        if not (found := run.trouble(was_killed=True)):
            missing = [f"not printed: {line}" for line in unprinted(lines, again.lines(), printed)]
            found = difference(records, again.records(), run.records()) if records else some(missing)
        count = repeated(run.records()) if records else max(0, len(printed) - len(lines))
        cost = f"{count} {'step' if records else 'line'}{'s' * (count != 1)}"
        lost_s = max(0, run.seconds - min(alone.seconds, again.seconds))
        table.append((moment.text, "DIFFERS" if found else "equal", cost, f"{lost_s:.1f} s"))
        bad += [f"{moment.text}: {found}"] if found else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table))
    compared = "the lines of output, but for words that differ between two quiet runs. No Keeper was entered"
    if records:
        its = next(iter(records.values()))
        compared = f"bit for bit, at {its[-1]['step'] - 1} steps of {len(alone.pids())} ranks: losses, inputs of the "
        compared += f"model, evaluations, {len(its[-1]['facts'])} values of state"
    print("\n".join([f"compared: {compared}", *bad]))
    print("a failure changes the result" if bad else "equal: no failure has changed what was compared")
    return 1 if bad else 0


def _moments(alone: Run) -> list[Moment]:
    """The failures to come, each at another place of the run."""
    records = alone.records()
    if not records:
        lines, last = max(1, len(alone.lines()) // 2), max(alone.pids())
        where = f"after line {lines} of the output"
        killed = Moment(f"rank {last}, {where}", (last,), lines=lines)
        return [killed, Moment(f"the agent, {where}", agent=True, lines=lines)]
    name = max(records, key=lambda key: steps_done(records, key[0]))[0]
    its = {rank: found for (of, rank), found in records.items() if of == name}
    steps, first, last = steps_done(records, name), min(its), max(its)
    third, half, late = (max(1, steps * n // 6) for n in (2, 3, 4))
    found = [
        Moment(f"rank {last}, after a backward pass of step {half}", (last,), "backward", half),
        Moment(f"rank {last}, within the commit of step {third}", (last,), "commit", third),
    ]
    pairs = [(record, rank) for rank, of in its.items() for record in of]
    if evaluated := sorted((each["step"] - 1, rank) for each, rank in pairs if {*EVALUATIONS} & {*each["facts"]}):
        step, rank = evaluated[len(evaluated) // 2]
        found.append(Moment(f"rank {rank}, in the evaluation of step {step}", (rank,), "evaluation", step))
    if len(its) > 1:
        found.append(Moment(f"all ranks, in step {late}", (*its,), "backward", late))
    found.append(Moment(f"the agent, in step {half}", (first,), "backward", half, agent=True))
    return [replace(each, name=name) for each in found]


class _Jobs:
    """Starts the job of each run. `links` are what the script finds in its own folder."""

    def __init__(
        self, folder: Path, command: Sequence[str], environ: Mapping[str, str], steps: int, links: Sequence[Path]
    ) -> None:
        self._folder, self._command, self._environ, self._steps, self._links = folder, command, environ, steps, links
        self._count, self._limit_s = 0, float("inf")

    def run(self, moment: Moment) -> Run:
        """One run to its end. If its agent is killed, the same command is typed again."""
        self._count += 1
        run = Run(self._folder / str(self._count))
        (run.folder / "work").mkdir(parents=True)
        for link in self._links:
            (run.folder / "work" / link.name).symlink_to(link)
        _say(f"run {self._count}: {moment.text}")
        begin_s = time.monotonic()
        code = self._job(run, moment)
        if moment.agent and code == -signal.SIGKILL:
            code = self._job(run, Moment("the same command again"))
        run = Run(run.folder, code, time.monotonic() - begin_s)
        self._limit_s = min(self._limit_s, _LIMIT_S + 5 * run.seconds)
        return run

    def _job(self, run: Run, moment: Moment) -> int:
        asked = json.dumps({**asdict(moment), "folder": str(run.folder), "steps": self._steps})
        with (run.folder / "output").open("ab") as output:
            job = subprocess.Popen(
                self._command,
                cwd=run.folder / "work",
                env={**self._environ, "ELAUNCH_REHEARSAL": asked},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        (run.folder / "agent.pid").write_text(str(job.pid))
        end_s = time.monotonic() + self._limit_s
        # With a Keeper the rank does it itself.
        is_due = bool(moment.lines)
        try:
            while job.poll() is None:
                time.sleep(_LOOK_S)
                if is_due and len(run.lines()) >= moment.lines and {*moment.ranks} <= run.pids().keys():
                    is_due = False
                    # It may have ended a moment ago.
                    with suppress(ProcessLookupError):
                        os.kill(job.pid if moment.agent else run.pids()[moment.ranks[0]], signal.SIGKILL)
                if time.monotonic() > end_s:
                    _say(f"run {self._count} was terminated: it exceeded {self._limit_s:.0f} s")
                    return 124
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
            # The guardian ends the ranks of a killed agent.
            end_s, pids = time.monotonic() + _END_S, run.pids()
            while any(Path(f"/proc/{pid}").exists() for pid in pids.values()) and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
        return job.returncode


def _json_lines(path: Path) -> list[Record]:
    """The lines that are whole: a process may have been killed while it wrote."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _say(text: str) -> None:
    print(f"elaunch: rehearse: {text}", file=sys.stderr, flush=True)
