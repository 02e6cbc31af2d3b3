"""`elaunch rehearse`: runs a script alone and then with failures, and says what each of them changes and costs."""

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
from typing import NoReturn

from elaunch.launcher.errors import NoSuchOption, UsageError
from elaunch.launcher.options.argv import LONG, normalise
from elaunch.launcher.options.commands import REHEARSE_FLAGS
from elaunch.launcher.options.options import HelpRequested, Options, parse
from elaunch.launcher.preflight import check_program
from elaunch.launcher.rehearse.compare import Record, difference, repeated, some, steady, steps_done, unprinted
from elaunch.records import dataclass
from elaunch.rendezvous.job_spec import ProgramKind

_FLAGS = "".join(f"  {f'{name} {value}':12} {text}\n" for name, value, text in REHEARSE_FLAGS)
HELP = f"""\
Usage: elaunch rehearse [--steps N] [--link PATH] [options of a job] script.py args…

What does a failure cost this script, and does it change the result? The script runs twice alone, and then with one
failure in each run: a rank dies after its backward pass, within the commit, in an evaluation; all ranks; the agent.

With a Keeper each run ends after N steps. Losses, inputs and the state of each step and rank are compared bit for bit.
Without one each run goes to the script's own end, so give it arguments for a short run. Then what it prints, and the
files that it leaves in its folder, are compared.

{_FLAGS}
Each run has an empty folder of its own, which is removed. The Keeper's checkpoints go there too, wherever the script
puts them. A script that writes other files to absolute paths would write to the same ones in each run.

Exit codes: 0 nothing differs, 1 something does or the script fails, 2 the command line is wrong.
Start a script called rehearse with elaunch ./rehearse.
"""
_STEPS_MIN = 4
# The longest time of a run beyond five times the first one's; of its end; between two lines about it; between looks.
_LIMIT_S, _END_S, _NEWS_S, _LOOK_S = 60.0, 30.0, 10.0, 0.05


@dataclass(frozen=True)
class Moment:
    """A failure: these ranks, or the agent, are killed. `at` is the place, the step and the number of the pass in it.

    Without a Keeper (`name` is "") it comes after `lines` of output, or without output after `after_s`.
    """

    text: str
    at: tuple[str, int, int] = ("", 0, 0)
    ranks: tuple[int, ...] = ()
    agent: bool = False
    name: str = ""
    lines: int = 0
    after_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """What a run has left in `folder`."""

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

    def was_killed(self) -> bool:
        """Whether the ranks were started again."""
        return len([*self.folder.glob("logs/2*/attempt_*")]) > 1

    def tail(self) -> str:
        """The end of the job's output."""
        return "\n".join((self.folder / "output").read_text(errors="replace").splitlines()[-20:])


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command. Returns the exit code. Raises UsageError."""
    if argv[:1] and argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    try:
        words, steps, links = _split(argv)
        options = parse(words, environ)
    except NoSuchOption as error:
        own = (name.removeprefix("--") for name, _, _ in REHEARSE_FLAGS)
        raise NoSuchOption(error.word, (*own, *LONG), "rehearse") from None
    if isinstance(options, HelpRequested):
        print(options.text if "--version" in words else HELP.rstrip("\n"))
        return 0
    check_program(options, environ)
    if options.nnodes[1] > 1 or options.target == "-":
        raise UsageError("rehearse runs a script that is a file, on this node alone: leave --nnodes and - out")
    # A module is found where the command was typed.
    path = os.pathsep.join(filter(None, [str(Path.cwd()), environ.get("PYTHONPATH", "")]))
    signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="elaunch_rehearse_", ignore_cleanup_errors=True) as folder:
        jobs = _Jobs(Path(folder), _command(options, words), {**environ, "PYTHONPATH": path}, steps, links)
        try:
            return _rehearse(jobs)
        except KeyboardInterrupt:
            _say("interrupted; the job is ended, and its folder is removed")
            return 130


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(143)


def _split(argv: Sequence[str]) -> tuple[list[str], int, list[Path]]:
    """The words of the job, and the values of this command's own options. Raises UsageError."""
    words: list[str] = []
    own: dict[str, list[str]] = {name: [] for name, _, _ in REHEARSE_FLAGS}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in own or "--" in words or normalise(words).program:
            words.append(word)
        elif equals or rest:
            own[name].append(value if equals else rest.pop(0))
        else:
            raise UsageError(f"{name} needs a value")
    steps, links = (own["--steps"] or ["40"])[-1], [Path(each).absolute() for each in own["--link"]]
    if not steps.isdecimal() or int(steps) < _STEPS_MIN:
        raise UsageError(f"--steps {steps}: it takes a number of steps, at least {_STEPS_MIN}")
    if missing := [str(each) for each in links if not each.exists()]:
        raise UsageError(f"--link {missing[0]}: there is no such file or folder")
    return words, int(steps), links


def _command(options: Options, words: Sequence[str]) -> list[str]:
    """The job's command, for another folder."""
    given = [
        f"--{spec.name}" if spec.is_switch else f"--{spec.name}={_absolute(value) if spec.metavar == 'FILE' else value}"
        for spec, value in normalise(words).options
        if spec.name not in ("module", "no-python", "log-dir")
    ]
    kind = {ProgramKind.MODULE: ["-m"], ProgramKind.COMMAND: ["--no-python"]}.get(options.kind, [])
    target = options.target if options.kind is ProgramKind.MODULE else _absolute(options.target)
    return [sys.executable, "-m", "elaunch", *given, *kind, "--log-dir=../logs", "--", target, *options.args]


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path


def _rehearse(jobs: _Jobs) -> int:
    """All runs and their verdicts. Returns the exit code."""
    alone, again = jobs.run(Moment("left alone")), None
    if not alone.code:
        again = jobs.run(Moment("left alone, once more"))
    if again is None or again.code:
        failed = again or alone
        print(f"{failed.tail()}\nthe script fails although nothing was killed: exit code {failed.code}")
        print("if it lacks a file that it reads from the folder where it starts, give --link PATH")
        return 1
    records, quiet_s = alone.records(), min(alone.seconds, again.seconds)
    if records and (found := difference(records, again.records(), again.records())):
        print(f"two runs without a failure differ, so there is nothing to compare with; set all seeds\n{found}")
        return 1
    if records and not steps_done(records, next(iter(records))[0]):
        print("a Keeper was entered, and no step was done: there is nothing to rehearse")
        return 1
    moments = _moments(alone)
    table, bad = [("failure", "result", "repeated", "lost")], []
    for moment in moments:
        run = jobs.run(moment)
        found = _difference(alone, again, run)
        if run.code or not run.was_killed():
            found = f"the job ended with exit code {run.code}, {'' if run.was_killed() else 'before '}the failure came"
            found += f"\n{run.tail()}"
        cost = (
            f"{repeated(run.records())} steps" if records else f"{max(0, len(run.lines()) - len(alone.lines()))} lines"
        )
        table.append((moment.text, "DIFFERS" if found else "equal", cost, f"{max(0, run.seconds - quiet_s):.1f} s"))
        bad += [f"{moment.text}: {found}"] if found else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table))
    print("\n".join([_compared(alone, again), *bad]))
    print("a failure changes the result" if bad else "equal: no failure has changed what was compared")
    return 1 if bad else 0


def _moments(alone: Run) -> list[Moment]:
    """The failures to come, each at another place of the run."""
    records = alone.records()
    if not records:
        middle, after_s, last = len(alone.lines()) // 2, alone.seconds / 2, max(alone.pids(), default=0)
        where = f"after {middle} lines of output" if middle else f"after {after_s:.1f} s"
        whom = [(f"rank {last}, {where}", (last,)), (f"the agent, {where}", ())]
        return [Moment(text, ranks=ranks, agent=not ranks, lines=middle, after_s=after_s) for text, ranks in whom]
    name = max(records, key=lambda key: steps_done(records, key[0]))[0]
    steps, ranks = steps_done(records, name), sorted(rank for of, rank in records if of == name)
    passes = {
        (r["kind"], rank, r["step"]): r["passes"] for (of, rank), its in records.items() if of == name for r in its
    }
    third, half, late, last = *(max(1, steps * n // 6) for n in (2, 3, 4)), ranks[-1]
    failures = [
        (
            f"rank {last}, after the backward pass of step {half}",
            ("backward", half, passes["done", last, half]),
            [last],
        ),
        (f"rank {last}, within the commit of step {third}", ("commit", third, 1), [last]),
    ]
    if evaluated := sorted((step, rank, n) for (kind, rank, step), n in passes.items() if kind == "begin" and n):
        step, rank, n = evaluated[len(evaluated) // 2]
        failures.append(
            (f"rank {rank}, in the evaluation before step {step}", ("evaluation", step, n // 2 + 1), [rank])
        )
    if len(ranks) > 1:
        failures.append((f"all ranks, in step {late}", ("backward", late, passes["done", last, late]), ranks))
    failures.append((f"the agent, in step {half}", ("backward", half, passes["done", ranks[0], half]), ranks[:1]))
    return [Moment(text, at, (*whom,), text.startswith("the agent"), name) for text, at, whom in failures if at[2]]


def _difference(alone: Run, again: Run, run: Run) -> str:
    """What differs in `run`, less what differs in `again` too; "" if nothing does."""
    if records := alone.records():
        return difference(records, again.records(), run.records())
    found = [f"not printed: {line}" for line in unprinted(steady(alone.lines(), again.lines()), run.lines())]
    for name in _files(alone):
        if not _inside(alone, again, name) and (inside := _inside(alone, run, name)):
            found.append(f"{name} ({some(inside)})")
    return some(found)


def _files(run: Run) -> list[str]:
    work = run.folder / "work"
    return sorted(str(path.relative_to(work)) for path in work.rglob("*") if path.is_file())


def _inside(run: Run, other: Run, name: str) -> list[str]:
    """What differs in a file of two runs; of torch's own files the values by name."""
    paths = [each.folder / "work" / name for each in (run, other)]
    if not paths[1].is_file():
        return ["it is not there"]
    if paths[0].read_bytes() == paths[1].read_bytes():
        return []
    command = [sys.executable, "-m", "elaunch.trainer.keeper.rehearsal", *map(str, paths)]
    names: list[str] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return names


def _compared(alone: Run, again: Run) -> str:
    """What the verdict stands on."""
    records = alone.records()
    if not records:
        lines, files = alone.lines(), _files(alone)
        alike = [name for name in files if not _inside(alone, again, name)]
        return (
            f"compared: {len(steady(lines, again.lines()))} of {len(lines)} lines of output, but for words that always "
            f"differ, and {len(alike)} of {len(files)} files. No Keeper was entered, so no state was seen"
        )
    begins = [r for its in records.values() for r in its if r["kind"] == "begin"]
    no_evaluation = (
        "" if any(r["passes"] for r in begins) else ". There was no evaluation to be killed in; raise --steps"
    )
    return (
        f"compared bit for bit, at {max(r['step'] for r in begins) - 1} steps of {len(alone.pids())} ranks: losses, "
        f"inputs of the model, evaluations, random states, {len(begins[-1]['state'])} values of state{no_evaluation}"
    )


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
        asked = {"folder": str(run.folder), "steps": self._steps, "name": moment.name, "moment": moment.at}
        asked |= {"ranks": moment.ranks, "agent": moment.agent}
        environ = {**self._environ, "ELAUNCH_REHEARSAL": json.dumps(asked)}
        with (run.folder / "output").open("ab") as output:
            job = subprocess.Popen(
                self._command,
                cwd=run.folder / "work",
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        (run.folder / "agent.pid").write_text(str(job.pid))
        is_due = not moment.name
        begin_s = news_s = time.monotonic()
        try:
            while job.poll() is None:
                time.sleep(_LOOK_S)
                since_s = time.monotonic() - begin_s
                if is_due and _is_reached(run, moment, since_s):
                    is_due = False
                    # It may have ended a moment ago.
                    for pid in [job.pid] if moment.agent else [run.pids()[rank] for rank in moment.ranks]:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                if time.monotonic() - news_s > _NEWS_S:
                    news_s += _NEWS_S
                    records = run.records()
                    step = max((steps_done(records, name) for name, _ in records), default=None)
                    where = "no Keeper is entered, so it runs to its own end" if step is None else f"step {step}"
                    _say(f"run {self._count}: {since_s:.0f} s, {where}")
                if since_s > self._limit_s:
                    _say(f"run {self._count} is ended: it takes more than {self._limit_s:.0f} s")
                    return 124
        finally:
            _end(job, run)
        return job.returncode


def _is_reached(run: Run, moment: Moment, since_s: float) -> bool:
    if moment.lines:
        return {*moment.ranks} <= run.pids().keys() and len(run.lines()) >= moment.lines
    return bool(moment.after_s) and since_s >= moment.after_s and {*moment.ranks} <= run.pids().keys()


def _end(job: subprocess.Popen[bytes], run: Run) -> None:
    """End the job if it runs, and wait until its ranks are gone: the guardian ends those of a killed agent."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            job.send_signal(signum)
            with suppress(subprocess.TimeoutExpired):
                job.wait(_END_S)
    end_s = time.monotonic() + _END_S
    while any(Path(f"/proc/{pid}").exists() for pid in run.pids().values()) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def _json_lines(path: Path) -> list[Record]:
    """The lines that are whole: a process may have been killed while it wrote."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _say(text: str) -> None:
    print(f"elaunch: rehearse: {text}", file=sys.stderr, flush=True)
