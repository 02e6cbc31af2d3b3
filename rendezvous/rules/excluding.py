"""Keeps a node out of the job that fails the same way again and again (`--exclude-after`). Pure.

The evidence is in the rank tables: each table carries the streak of failures up to it, and all exclusions. So a new
leader decides as the old one would have. An excluded node stays a member, and so a spare of last resort.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elaunch.rendezvous.rules.verdict import decisive_failure, is_one_bug
from elaunch.rendezvous.types import Exclusion, Failure, FailureKind, RankTable, Streak, Terms, host_of

# After a generation that ran for so long, the streak begins anew: rare failures fall on one node by chance.
STREAK_AGE_MAX_S = 3600.0
# These say nothing about the node on which they happened.
_BLAMELESS = (FailureKind.PEER_LOST, FailureKind.ENDED_EARLY, FailureKind.DEBUGGER, FailureKind.REFUSED)


@dataclass(frozen=True)
class Suspicion:
    """Who is to blame after a failure. `fresh` is the exclusion that this failure brought, if it did.

    `on_trial` is the node that will be excluded if it fails so again and again; empty if no node has failed so twice.
    """

    streak: Streak | None
    excluded: tuple[Exclusion, ...]
    fresh: Exclusion | None = None
    on_trial: str = ""

    def seatable(self, members: Iterable[str]) -> list[str]:
        """The members that are neither excluded nor on trial."""
        return [node_id for node_id in members if not self._is_suspect(node_id)]

    def _is_suspect(self, node_id: str) -> bool:
        is_on_trial = bool(self.on_trial) and self.on_trial in (node_id, host_of(node_id))
        return is_on_trial or is_excluded(node_id, self.excluded)


NO_SUSPICION = Suspicion(None, ())


def stand(
    terms: Terms, before: RankTable, failures: Sequence[Failure], members: Collection[str], table_age_s: float
) -> Suspicion:
    """Who is to blame after the generation of `before`, which failed by `failures` and not because a node was lost.

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
    who, way = _identity(failure.node_id, members), way_of(failure)
    # The same failure on another node acquits those that are excluded for it: then it is the program's.
    excluded = tuple(each for each in before.excluded if each.way != way or each.who == who)
    has_acquitted = excluded != before.excluded
    streak = before.streak
    goes_on = streak is not None and (streak.who, streak.way) == (who, way) and table_age_s < STREAK_AGE_MAX_S
    times = streak.times + 1 if streak and goes_on else 1
    if times < terms.exclude_after or has_acquitted or is_excluded(failure.node_id, excluded):
        is_on_trial = 1 < times < terms.exclude_after and not has_acquitted
        return Suspicion(Streak(who, way, times), excluded, on_trial=who if is_on_trial else "")
    why = f"the last {times} failures were all on {failure.host}, and alike" if times > 1 else f"{failure.host} failed"
    fresh = Exclusion(who, way, f"{why} ({way})")
    return Suspicion(None, (*excluded, fresh), fresh)


def way_of(failure: Failure) -> str:
    """How a worker failed, in words that are equal for failures that are alike."""
    return f"{failure.kind.value}: {failure.exception}" if failure.exception else failure.kind.value


def is_excluded(node_id: str, excluded: Iterable[Exclusion]) -> bool:
    return exclusion_of(node_id, excluded) is not None


def exclusion_of(node_id: str, excluded: Iterable[Exclusion]) -> Exclusion | None:
    """The exclusion of this node, or of its host."""
    return next((each for each in excluded if each.who in (node_id, host_of(node_id))), None)


def _identity(node_id: str, members: Iterable[str]) -> str:
    """The host, so that an agent that is started again there is known; the node if its host's name is not its own."""
    host = host_of(node_id)
    is_alone = not any(other != node_id and host_of(other) == host for other in members)
    return host if is_alone else node_id
