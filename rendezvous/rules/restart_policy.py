"""Decides why a generation failed, whether another one is worth starting, and which node is excluded from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.rendezvous.format import listed, plural
from elaunch.rendezvous.types import Exclusion, Failure, FailureKind, RankTable, Streak, Terms, host_of

_TRACEBACK = "Traceback (most recent call last)"
# The exit code of a process killed by SIGKILL.
_KILLED = -9
# Generations in a row without progress that end a job whatever their kind (protocol, rule 9).
NO_PROGRESS_MAX = 10

# Exceptions that come from a bug in the program, or from bad data. Any other may come from its surroundings: a device,
# a network, a file system, a service.
_BUGS = {
    *("AssertionError", "AttributeError", "FileExistsError", "FloatingPointError", "ImportError", "IndexError"),
    *("KeyError", "LookupError"),
    *("ModuleNotFoundError", "NameError", "NotImplementedError", "OverflowError", "RecursionError", "RuntimeError"),
    *("TypeError", "UnboundLocalError", "UnicodeDecodeError", "UnicodeEncodeError", "ValueError", "ZeroDivisionError"),
}
# RuntimeErrors of torch that are not the program's bug.
_OF_SURROUNDINGS = re.compile(
    r"cuda|cudnn|cublas|nccl|hip error|gloo|dataloader worker|timed? ?out|connect|unavailable|temporar|reset"
    r"|\b50[0234]\b",
    re.IGNORECASE,
)
# Errors of a service, a network or a lock that may be gone a few seconds later, even before the first progress.
_MAY_PASS = re.compile(
    r"\b429\b|\b50[0234]\b|too many requests|rate.?limit|throttl|slow ?down|overloaded|\bbusy\b|temporar|try again"
    r"|unavailable|max retries|connection (?:reset|aborted)|remote end closed|incomplete ?read|stale file"
    r"|\block(?:ed)?\b|(?:read|request|operation|connection) timed out|\bssl",
    re.IGNORECASE,
)
# The program's own store is unreachable, which no peer's exit explains: the agent serves the job's store.
_NO_STORE = re.compile(r"client socket has (?:failed to connect|timed out)", re.IGNORECASE)
# Two workers that report no step are taken to have failed in the same step if they ran equally long: within this many
# seconds, or within this share of the longer one.
_AS_LONG_S = 2.0
_AS_LONG_SHARE = 0.1
_AWAITED, _TOO = ", while ", ", and so "
# Signals of crashes in native code: SIGILL, SIGBUS, SIGFPE, SIGSEGV. Not SIGABRT: NCCL aborts if a network fails.
_CRASHES = (-4, -7, -8, -11)
# EX_TEMPFAIL of <sysexits.h>: a temporary failure, to be retried.
_TRY_AGAIN = 75
# A line that torch's own code logs, as "[rank0]:[W1128 19:05:18.1 ProcessGroup.cpp:1] …".
_TORCHS_LINE = re.compile(r"(?:\[rank\d+\]:)?\[[IWEF]\d")
# A worker that fails within this time without reporting a step is taken not to have reached its first one.
_START_S = 60.0


@dataclass(frozen=True)
class Restart:
    """Another generation is worth starting."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Another generation is not worth starting. `reason` ends a sentence that begins with the failure.

    `code` is the exit code of the job.
    """

    reason: str
    code: int = 1


def decisive_failure(failures: Sequence[Failure], no_restart_codes: Collection[int] = ()) -> Failure:
    """The failure by which a generation is judged: the first in the record that no peer's exit explains.

    One with an exit code in `no_restart_codes` takes precedence: by that code the program refuses a restart.
    If all others only lost a peer, a rank that ended with exit code 0 before them is the peer that they lost.
    """
    causes = [f for f in failures if not f.kind.is_secondary]
    if primary := next((f for f in causes if f.code in no_restart_codes), causes[0] if causes else None):
        if primary.code == _KILLED and _TRACEBACK not in primary.tail:
            # A rank that raises may kill its peers, and itself last.
            primary = next((f for f in failures if f.code == _KILLED and _TRACEBACK in f.tail), primary)
        return awaited(primary, failures) if primary.kind is FailureKind.EXIT_CODE else primary
    early = next((f for f in failures if f.kind is FailureKind.ENDED_EARLY), None)
    lost = [f for f in failures if f.kind is FailureKind.PEER_LOST]
    if early is None or (lost and all(_NO_STORE.search(f.message) for f in lost)):
        return next(iter(lost), failures[0])
    return awaited(early, failures)


def first_failure(failures: Mapping[int, Sequence[Failure]]) -> Failure | None:
    """The job's first failure, None without one. A lost peer counts only if nothing else failed: a node may be lost."""
    decided = [decisive_failure(failures[generation]) for generation in sorted(failures)]
    return next((f for f in decided if f.kind is not FailureKind.PEER_LOST), decided[0] if decided else None)


def awaited(early: Failure, failures: Sequence[Failure]) -> Failure:
    """The record of a rank that exited on its own, with the ranks in `failures` that waited for it."""
    lost = [f for f in failures if f.kind is FailureKind.PEER_LOST and f.rank != early.rank]
    if not lost:
        return early
    message, _, known = early.message.partition(_AWAITED)
    # The record may already name ranks of its own node.
    named = {f.rank for f in lost}.union(map(int, re.findall(r"\d+", known.partition(" waited")[0])))
    shown = listed([str(rank) for rank in sorted(named)])
    calls = {f.call for f in lost if f.call}
    where = f" in {calls.pop()}" if len(calls) == 1 else " for it"
    which = f"rank{'s' if len(named) > 1 else ''} {shown}"
    # A record names those with an error when it was written; elaunch's signal may end the others before they have one.
    more = " (perhaps others too)" if len(named) + 1 < early.world_size else ""
    return replace(early, message=f"{message}{_AWAITED}{which} waited{where}{more},")


def killed_together(killed: Failure, failures: Sequence[Failure]) -> Failure:
    """The failure; if a signal killed its rank, with the other ranks that the same signal killed."""
    same = {f.rank for f in failures if (f.kind, f.code) == (killed.kind, killed.code)} - {killed.rank}
    if killed.kind not in (FailureKind.SIGNAL, FailureKind.OUT_OF_MEMORY) or not same:
        return killed
    others = f"was rank {min(same)}" if len(same) == 1 else f"were ranks {listed([str(rank) for rank in sorted(same)])}"
    return replace(killed, message=f"{killed.message}{_TOO}{others},")


def identical(one: Failure, other: Failure) -> bool:
    """Whether two failures are the same error in the same place; numbers and addresses may differ."""
    if one.kind is FailureKind.ENDED_EARLY:
        return other.kind is one.kind and other.rank == one.rank
    if (one.kind, one.code) == (FailureKind.EXIT_CODE, _TRY_AGAIN):
        return False
    # Whatever its code: a rank may be killed after it has printed an exception.
    has_ended = one.kind is FailureKind.EXCEPTION or (one.code or 0) > 0
    return one.kind.counts_as_identical and has_ended and alike(one, other)


def alike(one: Failure, other: Failure) -> bool:
    """Whether two failures are the same except for numbers, whatever their kind is."""
    kinds = [(each.kind, each.code, each.exception, each.frame) for each in (one, other)]
    return kinds[0] == kinds[1] and _without_numbers(_own_message(one)) == _without_numbers(_own_message(other))


def _last_line(tail: str) -> str:
    lines = [line.strip() for line in tail.splitlines()]
    return next((line for line in reversed(lines) if line and not _TORCHS_LINE.match(line)), "")


def _may_pass(failure: Failure, earlier: Failure) -> bool:
    """Whether a failure before any progress, like the earlier one, may be transient."""
    if failure.kind is FailureKind.EXIT_CODE:
        line = _last_line(earlier.tail)
        return _without_numbers(_last_line(failure.tail)) != _without_numbers(line) or bool(_MAY_PASS.search(line))
    return bool(_MAY_PASS.search(f"{earlier.exception} {earlier.message}"))


def all_failed_alike(failures: Sequence[Failure], world_size: int) -> bool:
    """Whether there are several ranks, and all had the same bug of the program before their first step."""
    alike = [f for f in failures if is_one_bug(failures[0], f) and f.step < 0 and f.lived_s <= _START_S]
    return world_size > 1 and sum(f.ranks_alike for f in alike) == world_size


def is_one_bug(one: Failure, other: Failure) -> bool:
    """Whether two failures of one generation are the same bug of the program, whatever their nodes are."""
    return _is_bug(one) and identical(one, other)


def _is_bug(failure: Failure) -> bool:
    if failure.kind is FailureKind.ENDED_EARLY:
        return True
    is_exception = failure.kind is FailureKind.EXCEPTION and failure.exception in _BUGS
    return is_exception and not (_OF_SURROUNDINGS.search(failure.message) or _MAY_PASS.search(failure.message))


def judge(
    terms: Terms,
    failures: Mapping[int, Sequence[Failure]],
    generation: int,
    spent: int | None,
    no_progress: int,
    progressed: bool,
    *,
    is_elsewhere: bool = False,
    world_size: int = 0,
) -> Restart | GiveUp:
    """Whether the job continues after `generation`, whose records are in `failures`.

    `spent` counts the restarts already charged to the budget; None if this one is not charged. `no_progress` counts the
    generations in a row without progress. `progressed`: whether any generation of the job ever made progress.
    `is_elsewhere`: the next try is without the node that failed, or one of the next tries will be. `world_size` is that
    of the generation.
    """
    failure = decisive_failure(failures[generation], terms.no_restart_codes)
    before = failures.get(generation - 1)
    if failure.code in terms.no_restart_codes and not failure.kind.is_secondary:
        return GiveUp(f"exit code {failure.code} is in --no-restart-codes, so the job ends with it", failure.code)
    if failure.kind is FailureKind.DEBUGGER:
        return GiveUp(
            "its debugger was quit, or its stdin was at EOF, and another try would only stop there again;"
            " to debug any rank, start elaunch at a terminal with its stdin not redirected"
        )
    if failure.kind is FailureKind.REFUSED:
        return GiveUp("the program reported that another try would end the same way")
    if failure.kind is FailureKind.STARTUP and not progressed and not is_elsewhere:
        return GiveUp("it never got past its start, so another try would end the same way")
    if spent is None:
        # Whenever a node is lost, its peers fail in the same way. That is no evidence about the next try.
        return Restart("")
    # If it is unknown whether the rank made progress, its generation's progress decides.
    has_progressed = no_progress == 0 if failure.progressed is None else failure.progressed
    # On another node the same error need not recur.
    earlier = decisive_failure(before) if before and not is_elsewhere else None
    if earlier and (again := _repeated(failure, earlier, has_progressed=has_progressed)):
        return GiveUp(f"{again}, so another try would end the same way")
    if spent >= terms.max_restarts:
        return GiveUp(_budget(terms))
    if not is_elsewhere and all_failed_alike(failures[generation], world_size):
        return GiveUp(
            f"all {world_size} ranks raised the same error at the same line soon after their start, so another try"
            " would end the same way"
        )
    if no_progress >= NO_PROGRESS_MAX:
        return GiveUp(f"{no_progress} generations in a row made no progress")
    left = terms.max_restarts - spent - 1
    return Restart(f"restart {spent + 1} of {terms.max_restarts}" + ("" if left else ", the last one"))


def _repeated(failure: Failure, earlier: Failure, *, has_progressed: bool) -> str:
    """How the failure was repeated, if that makes a retry pointless; else "".

    The rank may be another one: if all ranks have a bug, chance decides which of them is recorded first.
    """
    crashes = _is_crash(failure) and alike(failure, earlier)
    if not crashes and not identical(failure, earlier):
        return ""
    twice = "it failed the same way twice in a row"
    if not has_progressed and not _may_pass(failure, earlier):
        return f"{twice} without progress"
    if not crashes and not _is_bug(failure):
        return ""
    if failure.step >= 0 or earlier.step >= 0:
        return f"{twice}, in the same step, after step {failure.step}" if failure.step == earlier.step else ""
    messages = {re.sub(r"0x[0-9a-fA-F]+", "#", each.message) for each in (failure, earlier)}
    if failure.kind is FailureKind.EXCEPTION and len(messages) > 1:
        return ""
    longer_s = max(failure.lived_s, earlier.lived_s)
    is_as_long = abs(failure.lived_s - earlier.lived_s) <= max(_AS_LONG_S, _AS_LONG_SHARE * longer_s)
    return f"{twice}, after about the same time" if is_as_long else ""


def _is_crash(failure: Failure) -> bool:
    """Whether native code crashed at a known line, or the fork server was killed."""
    is_server_killed = failure.kind is FailureKind.TEMPLATE_LOST and failure.code == _KILLED
    return is_server_killed or (failure.code in _CRASHES and failure.frame != "")


def _budget(terms: Terms) -> str:
    if terms.max_restarts == 0:
        return "max_restarts is 0, so any failure ends the job"
    within = "" if terms.restart_window_s is None else f" within {terms.restart_window_s:g} s"
    return f"the budget of {plural(terms.max_restarts, 'restart')}{within} is spent"


def _own_message(failure: Failure) -> str:
    """The message without the other ranks that it names, which vary by chance."""
    is_exit = failure.kind in (FailureKind.EXIT_CODE, FailureKind.ENDED_EARLY)
    is_kill = failure.kind in (FailureKind.SIGNAL, FailureKind.OUT_OF_MEMORY)
    end = _AWAITED if is_exit else _TOO if is_kill else ""
    return failure.message.partition(end)[0] if end else failure.message


def _without_numbers(message: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)


# After a generation that ran for this long, the streak begins again: rare failures fall on one node by chance.
STREAK_AGE_MAX_S = 3600.0
# These are no evidence against the node on which they happened.
_BLAMELESS = (FailureKind.PEER_LOST, FailureKind.ENDED_EARLY, FailureKind.DEBUGGER, FailureKind.REFUSED)


@dataclass(frozen=True)
class Suspicion:
    """Which node is to blame after a failure. `fresh` is the exclusion that this failure caused, if it did.

    `on_trial` is a node with two or more such failures in a row, but too few to exclude it; else empty.
    """

    streak: Streak | None
    excluded: tuple[Exclusion, ...]
    fresh: Exclusion | None = None
    on_trial: str = ""

    def seatable(self, members: Iterable[str]) -> list[str]:
        """The members that are neither excluded nor on trial."""
        suspects = (*(each.who for each in self.excluded), self.on_trial)
        return [node_id for node_id in members if node_id not in suspects and host_of(node_id) not in suspects]


def assess(
    terms: Terms, before: RankTable, failures: Sequence[Failure], members: Collection[str], table_age_s: float
) -> Suspicion:
    """Which node is to blame for the end of `before`, which failed with `failures` and not because a node was lost.

    `members` are the ids of all members, `table_age_s` is the time since the table was sealed.
    """
    unchanged = Suspicion(before.streak, before.excluded)
    if not (terms.exclude_after and failures and terms.nodes_max > 1):
        return unchanged
    failure = decisive_failure(failures)
    if failure.kind in _BLAMELESS or failure.is_blameless or before.group_rank(failure.node_id) is None:
        return unchanged
    if any(other.node_id != failure.node_id and is_one_bug(failure, other) for other in failures):
        return Suspicion(None, before.excluded)
    who, way = _identity(failure.node_id, members), failure_mode(failure)
    # The same failure on another node acquits the nodes excluded for it: the cause is the program.
    excluded = tuple(each for each in before.excluded if each.way != way or each.who == who)
    has_acquitted = excluded != before.excluded
    streak = before.streak
    continues = streak is not None and (streak.who, streak.way) == (who, way) and table_age_s < STREAK_AGE_MAX_S
    times = streak.times + 1 if streak and continues else 1
    if times < terms.exclude_after or has_acquitted or is_excluded(failure.node_id, excluded):
        is_on_trial = 1 < times < terms.exclude_after and not has_acquitted
        return Suspicion(Streak(who, way, times), excluded, on_trial=who if is_on_trial else "")
    why = f"the last {times} failures were all on {failure.host}, and alike" if times > 1 else f"{failure.host} failed"
    fresh = Exclusion(who, way, f"{why} ({way})")
    return Suspicion(None, (*excluded, fresh), fresh)


def failure_mode(failure: Failure) -> str:
    """How a worker failed: a text that is equal for failures that are alike."""
    return f"{failure.kind.value}: {failure.exception}" if failure.exception else failure.kind.value


def is_excluded(node_id: str, excluded: Iterable[Exclusion]) -> bool:
    return exclusion_of(node_id, excluded) is not None


def exclusion_of(node_id: str, excluded: Iterable[Exclusion]) -> Exclusion | None:
    """The exclusion of this node, or of its host."""
    return next((each for each in excluded if each.who in (node_id, host_of(node_id))), None)


def _identity(node_id: str, members: Iterable[str]) -> str:
    """The host, so that a restarted agent there is recognized; the node's id if other members share the host."""
    host = host_of(node_id)
    is_alone = not any(other != node_id and host_of(other) == host for other in members)
    return host if is_alone else node_id
