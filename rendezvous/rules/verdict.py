"""Decides why a generation failed, and whether another one is worth starting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from elaunch.records import dataclass
from elaunch.rendezvous.types import Failure, FailureKind, Terms

# Generations in a row without progress that end a job whatever their kind (protocol, rule 9).
BARREN_MAX = 10


@dataclass(frozen=True)
class Restart:
    """Another generation is worth starting."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Another generation is not worth starting. `reason` ends a sentence that begins with the failure."""

    reason: str


def decisive_failure(failures: Sequence[Failure]) -> Failure:
    """The failure by which a generation is judged: the first in the record that no peer's death explains."""
    primary = (f for f in failures if f.kind is not FailureKind.PEER_LOST)
    return next(primary, failures[0])


def identical(one: Failure, other: Failure) -> bool:
    """Whether two failures are the same error in the same place; numbers and addresses may differ."""
    return (
        one.kind.counts_as_identical
        and one.kind is other.kind
        and (one.code or 0) > 0
        and (one.code, one.exception, one.frame) == (other.code, other.exception, other.frame)
        and _without_numbers(one.message) == _without_numbers(other.message)
    )


def judge(
    terms: Terms,
    failures: Mapping[int, Sequence[Failure]],
    generation: int,
    spent: int | None,
    barren: int,
    progressed: bool,
) -> Restart | GiveUp:
    """Whether the job goes on after `generation`, whose records are in `failures`.

    `spent` counts the restarts already charged to the budget; None if this one is not charged. `barren` counts the
    generations in a row without progress. `progressed` says whether any generation of the job ever made progress.
    """
    failure = decisive_failure(failures[generation])
    before = failures.get(generation - 1)
    if failure.kind is FailureKind.DEBUGGER:
        return GiveUp(
            "its debugger was quit, or its stdin was at an end, and another try would only stop there again;"
            " to debug any rank, start elaunch at a terminal with its stdin not redirected"
        )
    if failure.kind is FailureKind.STARTUP and not progressed:
        return GiveUp("it never got past its start, so another try would end the same way")
    if spent is None:
        # Whenever a node is lost, its peers fail in the same way. That says nothing about the next try.
        return Restart("")
    # If it is unknown whether the rank made progress, its generation's progress decides.
    has_progressed = barren == 0 if failure.progressed is None else failure.progressed
    if before and not has_progressed and identical(failure, decisive_failure(before)):
        return GiveUp("it failed the same way twice in a row without progress, so another try would end the same way")
    if spent >= terms.max_restarts:
        return GiveUp(_budget(terms))
    if barren >= BARREN_MAX:
        return GiveUp(f"{barren} generations in a row made no progress")
    left = terms.max_restarts - spent - 1
    return Restart(f"restart {spent + 1} of {terms.max_restarts}" + ("" if left else ", the last one"))


def _budget(terms: Terms) -> str:
    if terms.max_restarts == 0:
        return "max_restarts is 0, so any failure ends the job"
    within = "" if terms.restart_window_s is None else f" within {terms.restart_window_s:g} s"
    restarts = "1 restart" if terms.max_restarts == 1 else f"{terms.max_restarts} restarts"
    return f"the budget of {restarts}{within} is spent"


def _without_numbers(message: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)
