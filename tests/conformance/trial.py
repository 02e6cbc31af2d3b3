"""A trial: one job under torchrun and under elaunch, and what is expected of each."""

from __future__ import annotations

import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.processes import described
from tests.harness import DEADLINE_S, Job, free_ports, wait_for, with_environment
from tests.standin import WITHOUT_TORCH

TORCHRUN, ELAUNCH = "torchrun", "elaunch"
# Each process of a job inherits it, whatever becomes of its parents.
_TAG = "CONFORMANCE_JOB"
# torchrun's lines about its rendezvous. LOGLEVEL does not reach them.
RENDEZVOUS_LINES = {"TORCH_LOGS": "+torch.distributed.elastic.rendezvous"}
# What outlives this outlives the job.
_OUTLIVES_S = 5.0

# Prints the variables that its arguments name, in one write, so that lines of several workers stay whole.
SAY = """
import os, sys

words = " ".join(f"{name}={os.environ.get(name)}" for name in sys.argv[1:])
os.write(1, f"rank {os.environ['RANK']}: {words}\\n".encode())
"""
# The same for its arguments.
SAY_ARGUMENTS = """
import os, sys

os.write(1, f"rank {os.environ['RANK']}: {sys.argv}\\n".encode())
"""
# For the beginning of a program: `meet()` returns when each rank of this round has called it.
MEET = """
import os, signal, subprocess, sys, time
from pathlib import Path

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def say(words):
    os.write(1, f"rank {RANK}: {words}\\n".encode())

def wait_for_file(name):
    while not Path(name).exists():
        time.sleep(0.02)

def meet():
    # Both launchers give a new port to each round, or to each job.
    round_name = f"met.{os.environ['MASTER_PORT']}.{WORLD_SIZE}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    Path(f"{round_name}.{RANK}").touch()
    for rank in range(WORLD_SIZE):
        wait_for_file(f"{round_name}.{rank}")
    say("all ready")
"""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a job's end is like.

    `code` is the exit code of every agent, `codes` are those of each. `says` are patterns (multi-line) that all are in
    the output of stdout and stderr, `never` those that are not. The first group of `same` has one value in all of its
    matches, that of `distinct` a different one in each. `leaves` are patterns of texts by the files' names below the
    job's folder, in which * stands for anything. `leftovers` is true if processes outlive the job.
    Seconds count from the start, or from the signal that was sent.
    """

    code: int = 0
    codes: tuple[int, ...] = ()
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    same: str = ""
    distinct: str = ""
    leaves: Mapping[str, str] = field(default_factory=dict)
    leftovers: bool = False
    seconds_min: float = 0
    seconds_max: float = DEADLINE_S


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One job. `args` is what is typed after the launcher's name; {folder} and {port} in it are filled in.

    `also` are the command lines of further agents on this host. The last of them waits until the output has `after`.
    `send` is a signal to the agent with the index `to`, and `touch` the name of a file that is made; both wait until
    the output has `when`. `program` is the text of train.py, `files` are others, all of them executable.
    """

    args: str
    torchrun: Expected
    elaunch: Expected | None = None
    program: str = SAY
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    also: tuple[str, ...] = ()
    after: str = ""
    when: str = "all ready"
    send: signal.Signals | None = None
    to: int = 0
    touch: str = ""
    needs_torch: bool = False

    def expected(self, launcher: str) -> Expected:
        return self.elaunch if launcher == ELAUNCH and self.elaunch else self.torchrun


@dataclass(frozen=True)
class Ended:
    """How a trial ended: the exit code of each agent, all that they wrote, and the processes that were left."""

    codes: tuple[int, ...]
    output: str
    left: tuple[str, ...]
    seconds: float


class Torchrun(Job):
    """One run of torchrun, by the name that needs no PATH."""

    command = (sys.executable, "-m", "torch.distributed.run")


def run(trial: Trial, launcher: str, folder: Path) -> Ended:
    """Run the trial's job in `folder`. Whatever outlives it is ended."""
    _prepare(trial, folder)
    tag = secrets.token_hex(8)
    port = free_ports(1)[0]
    agents: list[Job] = []

    def output() -> str:
        return "".join(agent.output for agent in agents)

    def wait_for_output(pattern: str) -> None:
        def is_there() -> bool:
            everything = output()
            has_ended = all(agent.process.poll() is not None for agent in agents)
            assert re.search(pattern, everything) or not has_ended, f"ended without {pattern!r}:\n{everything}"
            return bool(re.search(pattern, everything))

        wait_for(is_there, f"output like {pattern!r}", DEADLINE_S)

    begun_s = time.monotonic()
    with ExitStack() as stack:
        stack.callback(_end_all, tag)
        for index, args in enumerate((trial.args, *trial.also)):
            if trial.after and index == len(trial.also):
                wait_for_output(trial.after)
            words = [word.replace("{folder}", str(folder)).replace("{port}", str(port)) for word in shlex.split(args)]
            stdin = stack.enter_context((folder / "stdin").open())
            kind = Torchrun if launcher == TORCHRUN else Job
            agents.append(
                stack.enter_context(kind(folder, *words, env=_env(trial, launcher, folder, tag), stdin=stdin))
            )
        if trial.send or trial.touch:
            wait_for_output(trial.when)
        if trial.touch:
            (folder / trial.touch).touch()
        if trial.send:
            agents[trial.to].signal(trial.send)
            begun_s = time.monotonic()
        # An agent that has ended is reaped at once: programs may wait until its pid is gone.
        try:
            wait_for(lambda: None not in [agent.process.poll() for agent in agents], "the end of all", DEADLINE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{output()}") from None
        codes = tuple(agent.wait() for agent in agents)
        seconds = time.monotonic() - begun_s
        left = _left(tag, _OUTLIVES_S if trial.expected(launcher).leftovers else DEADLINE_S)
    return Ended(codes, output(), left, seconds)


def check(ended: Ended, expected: Expected, folder: Path) -> None:
    """Fails with the first thing that is not as expected, and with the whole output."""
    logged = f"\n{ended.output}"
    codes = expected.codes or (expected.code,) * len(ended.codes)
    assert ended.codes == codes, logged
    for pattern in expected.says:
        assert re.search(pattern, ended.output, re.MULTILINE), f"nothing like {pattern!r}:{logged}"
    for pattern in expected.never:
        assert not re.search(pattern, ended.output, re.MULTILINE), f"something like {pattern!r}:{logged}"
    if expected.same:
        found = re.findall(expected.same, ended.output)
        assert len(found) > 1, logged
        assert len(set(found)) == 1, logged
    if expected.distinct:
        found = re.findall(expected.distinct, ended.output)
        assert len(found) > 1, logged
        assert len(set(found)) == len(found), logged
    for name, pattern in expected.leaves.items():
        texts = [path.read_text() for path in folder.glob(name) if path.is_file()]
        assert any(re.search(pattern, text, re.MULTILINE) for text in texts), f"{name}: {texts}{logged}"
    assert bool(ended.left) is expected.leftovers, f"{ended.left}{logged}"
    assert expected.seconds_min <= ended.seconds <= expected.seconds_max, f"{ended.seconds:.1f} s{logged}"


def _prepare(trial: Trial, folder: Path) -> None:
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    (folder / "stdin").write_text(trial.stdin)
    for name, text in {"train.py": trial.program, **trial.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)


def _env(trial: Trial, launcher: str, folder: Path, tag: str) -> dict[str, str]:
    standin = WITHOUT_TORCH if launcher == ELAUNCH and not trial.needs_torch else {}
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), _TAG: tag}
    return {**own, **standin, **{name: value.replace("{folder}", str(folder)) for name, value in trial.env.items()}}


def _left(tag: str, within_s: float) -> tuple[str, ...]:
    """The command lines of the processes that are still there so long after the agents' end."""
    end_s = time.monotonic() + within_s
    while (found := with_environment(tag)) and time.monotonic() < end_s:
        time.sleep(0.05)
    return tuple(described(process) for process in found)


def _end_all(tag: str) -> None:
    for process in with_environment(tag):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
