"""Which worker did not come to a collective that timed out on others, with nobody dead; pure.

The others end by that error, and this agent would stop the rest. Before, it takes the stacks of those that live and
have raised nothing: if one of them does not wait for other ranks, it is the one that they waited for. One that had the
error too, and still handles it, looks the same: only numbers of collectives make a failure count against its node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elaunch.agent.core.actions import Action, Blame, KeepStacks, LookAtStacks, Say
from elaunch.agent.core.collectives import DEFAULT_GROUP
from elaunch.agent.core.phases import HeldEnd, Running
from elaunch.agent.core.stack_groups import Stack, full_text, group_words, grouped, ranks_words
from elaunch.agent.core.state import Agent, Step
from elaunch.agent.core.waits import Doing, does_where, doing
from elaunch.agent.peer_lost import TIMED_OUT
from elaunch.rendezvous.types import Failure

# The stacks of a node are taken in a tenth of that.
LOOK_S = 3.0
_MS = 1000
_CAUSE = re.compile(
    r"^rank (?P<rank>\d+) .* lost a peer(?: in (?P<call>[\w.]+))? \([\w.]+: .*"
    rf"(?i:{TIMED_OUT})"
)
_ENTERED = re.compile(rf"\bcollective (\d+) of {DEFAULT_GROUP} ")


@dataclass(frozen=True)
class CollectiveTimeout:
    """A collective in which `rank` waited: `words` say which one, if that is known, and for how long."""

    rank: int
    words: str


def timed_out(sentence: str) -> CollectiveTimeout | None:
    """What the sentence of a failure says of a collective that timed out; None if it says nothing of one."""
    found = _CAUSE.match(sentence)
    if found is None:
        return None
    which = "the all-reduce of a backward pass" if found["call"] == "backward" else found["call"]
    how_long = f"for {int(found['ms']) / _MS:g} s" if found["ms"] else f"for {found['s']} s"
    return CollectiveTimeout(int(found["rank"]), " ".join(filter(None, (which, how_long))))


def look(agent: Agent, running: Running, sentence: str, failure: Failure | None, now_s: float) -> Step | None:
    """Take the stacks of this node's workers that may be missed; None where none of them may be.

    `sentence` is that of a failure, which is `failure` where it is this node's.
    """
    candidates = _candidates(running)
    if timed_out(sentence) is None or not candidates:
        return None
    held = HeldEnd(failure, now_s + LOOK_S, timed_out=sentence)
    return replace(agent, phase=replace(running, held=held)), (LookAtStacks(running.table.generation, candidates),)


def judged(agent: Agent, running: Running, stacks: Sequence[Stack]) -> Step | None:
    """Make a failure of the worker that did not come, now that the stacks are there; None if that is not one."""
    assert running.held
    what, absent = timed_out(running.held.timed_out), _elsewhere(agent, running, stacks)
    if not what or len(absent) != 1:
        return None
    (late,), first = absent, running.seat_of(agent.me.node_id).first_rank
    waited = {what.rank} | {first + local for local in _that_waited(agent, running)}
    message = (
        f"did not come to the collective that timed out on {ranks_words(sorted(waited))} ({what.words}); it"
        f" {does_where(late)},"
    )
    is_blameless = not _began_fewer(late, stacks)
    blame = Blame(running.table.generation, late.rank - first, message, is_blameless=is_blameless)
    return replace(agent, phase=running), (*shown(agent, running, stacks), blame)


def shown(agent: Agent, running: Running, stacks: Sequence[Stack]) -> tuple[Action, ...]:
    """Show the workers that wait for no other rank; of several, each may be the one, and none is named."""
    absent = _elsewhere(agent, running, stacks)
    if not absent:
        return ()
    said = (Say(group_words(group)) for group in grouped(absent))
    return (*said, KeepStacks(running.table.generation, full_text(absent)))


def _candidates(running: Running) -> frozenset[int]:
    """The workers that live, and that neither raised nor ended nor save what only they hold."""
    leaving = frozenset(local_rank for local_rank, _ in running.leaving_s)
    words = running.words
    return running.live - leaving - words.returned - words.stopped - words.saving


def _that_waited(agent: Agent, running: Running) -> frozenset[int]:
    """The workers of this node that ended by an exception, or are about to."""
    ended_well = frozenset(end.local_rank for end in running.ends) | running.words.returned | running.words.stopped
    return frozenset(range(running.seat_of(agent.me.node_id).slots)) - _candidates(running) - ended_well


def _elsewhere(agent: Agent, running: Running, stacks: Sequence[Stack]) -> list[Stack]:
    """The stacks of those that may be missed and wait for no other rank. A wait for the GPU may be one for a rank."""
    first, here = running.seat_of(agent.me.node_id).first_rank, _candidates(running)
    unclear = (Doing.UNKNOWN, Doing.GPU)
    found = [(stack, doing(stack)) for stack in stacks if stack.rank - first in here]
    return [stack for stack, what in found if what not in unclear and not what.is_for_ranks]


def _began_fewer(late: Stack, stacks: Sequence[Stack]) -> bool:
    """Whether torch's flight recorder has counted fewer collectives of this rank than of another of its node."""
    numbers = {stack.rank: int(found[1]) for stack in stacks if (found := _ENTERED.search(stack.entered))}
    return late.rank in numbers and numbers[late.rank] < max(numbers.values())
