"""What a check finds: a grade, a sentence, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


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


def worst(findings: Iterable[Finding]) -> Grade:
    """The worst of their grades; OK if there are none."""
    return max((each.grade for each in findings), key=[*Grade].index, default=Grade.OK)


def span(seconds: float) -> str:
    """A duration for a person: `12.3 ms`, `3 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"
