"""The table of recognised causes, and what it adds to a failure."""

from __future__ import annotations

import re
from dataclasses import replace

from elaunch.agent.diagnosis import exit_status
from elaunch.agent.diagnosis.causes import hardware, network, program, system
from elaunch.agent.diagnosis.causes.cause import NO_FACTS, CauseRule, Evidence, Facts
from elaunch.agent.diagnosis.causes.program import NO_MAIN_GUARD
from elaunch.agent.diagnosis.causes.system import SOCKET_PATH
from elaunch.agent.diagnosis.exit_status import ends, parse_traceback
from elaunch.rendezvous.types import Failure, FailureKind

_SIGABRT = -6
# Only the last lines before an exit explain its code. An abort writes more: C++ stacks.
_LAST_LINES, _ABORT_LINES = 3, 40
# "raise X from error": the first error is the cause, and X shows where it surfaced.
_DIRECT_CAUSE = "\nThe above exception was the direct cause of the following exception:\n"
_RAISED = re.compile(r"^raised (?P<type>[\w.]+)(?:: (?P<message>.*))?$", re.DOTALL)
# The exception that a child process's exit raises in its parent.
_CHILD_ENDED = re.compile(r"ProcessExitedException|BrokenProcessPool|DataLoader worker|Connection reset by peer")
# The exception of a wait for a data loader or a manager that did not respond.
_NO_RESPONSE = re.compile(r"DataLoader|EOFError|Broken|Connection|timed? ?out|Empty", re.IGNORECASE)
# These need no search for a cause: the user left the debugger, the program hangs, or it has named the cause.
_NOT_RECOGNISED = (FailureKind.DEBUGGER, FailureKind.HANG, FailureKind.REFUSED)


def needs_disks(failure: Failure) -> bool:
    """Whether the file systems of this host must be read before the failure can be explained."""
    evidences = _evidences(failure, NO_FACTS)
    return any(rule.needs_disks and rule.values(evidence) is not None for evidence in evidences for rule in RULES)


def explained(failure: Failure, facts: Facts = NO_FACTS) -> Failure:
    """The failure, its output complete, with the advice for its cause and with what its own message lacks."""
    if failure.advice:
        return failure
    evidences = _evidences(failure, facts)
    causes = ((rule, cause) for evidence in evidences for rule in RULES if (cause := rule.cause(evidence)))
    found = next(causes, None)
    if found is None:
        return failure
    rule, (detail, advice) = found
    message = failure.message
    if detail and detail not in message:
        # An exception's own text may end in a bracket.
        is_open = not failure.exception and message.endswith(")")
        message = f"{message[:-1]}; {detail})" if is_open else f"{message} ({detail})"
    failure = replace(failure, message=message, advice=advice)
    return replace(failure, traceback=failure.frame, tail="", is_cut=True) if rule.is_enough else failure


def _evidences(failure: Failure, facts: Facts) -> list[Evidence]:
    """The evidence for the rules: each direct cause of an exception, the first one first, then the exception."""
    if failure.kind in _NOT_RECOGNISED or failure.rank < 0 or failure.code is None:
        return []
    was_killed = failure.code < 0 and failure.message.startswith("was killed")
    if failure.exception and not was_killed:
        return _of_exceptions(failure, facts)
    if failure.code < 0:
        is_crash = failure.code in exit_status.CRASH_CODES and exit_status.is_crash_stack(failure.traceback)
        return [
            Evidence(
                failure.code,
                text=_last(failure.tail, _ABORT_LINES) if failure.code == _SIGABRT else "",
                crash=failure.frame if is_crash else "",
                killed=failure.kind if was_killed else None,
                facts=facts,
            )
        ]
    return [Evidence(failure.code, text=_last(failure.tail, _LAST_LINES), facts=facts)]


def _of_exceptions(failure: Failure, facts: Facts) -> list[Evidence]:
    found: list[Evidence] = []
    if _NO_RESPONSE.search(f"{failure.exception} {failure.message}") and re.search(SOCKET_PATH, failure.tail):
        # A thread or process that could not create its socket has printed that. This one only waited for it.
        found.append(Evidence(failure.code, "OSError", "AF_UNIX path too long", facts=facts))
    if NO_MAIN_GUARD in failure.tail and _CHILD_ENDED.search(failure.message):
        # The child process has printed why it exited, to the same stderr. Its parent's exception lacks that.
        found.append(Evidence(failure.code, "RuntimeError", NO_MAIN_GUARD, facts=facts))
    for text in failure.traceback.split(_DIRECT_CAUSE):
        raised = parse_traceback(text)
        if raised is None:
            # The middle of a long traceback is left out.
            continue
        name = raised.exception.rpartition(".")[2]
        found.append(Evidence(failure.code, name, ends(raised.message), text, facts=facts))
    if found:
        return found
    raised_as = _RAISED.match(failure.message)
    text = (raised_as["message"] or "") if raised_as else failure.message
    return [Evidence(failure.code, failure.exception.rpartition(".")[2], ends(text), facts=facts)]


def _last(tail: str, count: int) -> str:
    lines = [line for line in tail.rstrip().splitlines() if line.strip()]
    return "\n".join(lines[-count:])


# By their titles in docs/failures.md. The first rule that applies wins: a specific cause stands before a general one.
SECTIONS: tuple[tuple[str, tuple[CauseRule, ...]], ...] = (
    ("Memory", hardware.MEMORY_RULES),
    ("GPUs", hardware.GPU_RULES),
    ("Nodes that differ", network.NODES_RULES),
    ("The script", program.RULES),
    ("Files, disks, networks and limits", system.RULES),
    ("Collectives", network.COLLECTIVES_RULES),
)
RULES = tuple(rule for _, rules in SECTIONS for rule in rules)
