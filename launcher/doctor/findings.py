"""What a check finds: a grade, a sentence, and the way out. And a process of its own for checks that may hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from elaunch.agent.linux import die_with_parent
from elaunch.strict_json import parse_json

_REAP_S = 0.5
# The current folder is not in the path: a user's json.py must not be imported.
_START = (
    "import sys; sys.path[0] = sys.argv.pop(1); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_LINE_MAX = 300


class Grade(Enum):
    """How a check ended. Only `BAD` means that training fails, or cannot start."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `advice` is the way out; it is empty for a check that is ok."""

    grade: Grade
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Needs:
    """What the job with these options needs of this node.

    `workers` is their number here. `ports` are those that MASTER_PORT may be; empty for any. `uses_python` is false for
    a program that is a command. `wants_gpus` says that the user asked for one worker per GPU.
    """

    workers: int = 1
    nodes_max: int = 1
    ports: tuple[int, ...] = ()
    interpreter: str = ""
    uses_python: bool = True
    wants_gpus: bool = False

    def need(self, what: str) -> str:
        return f"{self.workers} worker{' needs' if self.workers == 1 else 's need'} {what}"


def ok(found: str) -> Finding:
    return Finding(Grade.OK, found)


def warn(found: str, advice: str) -> Finding:
    return Finding(Grade.WARN, found, advice)


def bad(found: str, advice: str) -> Finding:
    return Finding(Grade.BAD, found, advice)


def worst(grades: Iterable[Grade]) -> Grade:
    """The worst of these grades; OK if there are none."""
    return max(grades, key=[*Grade].index, default=Grade.OK)


def span(seconds: float) -> str:
    """A duration for a person: `12.3 ms`, `3 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def as_json(findings: Iterable[Finding]) -> str:
    return json.dumps([[each.grade.value, each.found, each.advice] for each in findings])


def from_json(text: str) -> tuple[Finding, ...]:
    """The findings that another process has printed. Raises ValueError."""
    return tuple(Finding(Grade(grade), found, advice) for grade, found, advice in parse_json(text))


def python(module: str, *args: str) -> tuple[str, ...]:
    """The command that runs a module of elaunch in another process."""
    return (sys.executable, "-c", _START, str(Path(__file__).parents[3]), module, *args)


class ProbeFailed(Exception):
    """A probe gave no answer, perhaps since its time is over (`is_late`). The message says why."""

    is_late = False


class Probe:
    """A command in a process group of its own, which ends with this process, and whose output is an answer.

    A driver or a library may hang in the kernel, where not even SIGKILL ends a process: then it is left to the kernel.
    Start it from the main thread: the kernel ends the process when the thread that started it ends.
    """

    def __init__(self, argv: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> None:
        """Raises OSError if the command cannot be started."""
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(environ),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )

    def answer(self) -> str:
        """What the command has printed, when it has ended. Raises ProbeFailed."""
        try:
            said, complained = self._process.communicate(timeout=max(self._until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()
            late = ProbeFailed(f"no answer within {self._limit_s:g} s")
            late.is_late = True
            raise late from None
        if self._process.returncode:
            lines = complained.strip().splitlines() or [f"exit code {self._process.returncode}"]
            raise ProbeFailed(lines[-1][:_LINE_MAX])
        return said

    def kill(self) -> None:
        """End the command and what it has started, from any thread."""
        if self._process.poll() is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
