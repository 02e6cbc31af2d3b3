"""What a node does about ranks that hang, or that did not come to a collective that timed out on others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elaunch.agent.core.actions import Action, Blame, Commit, KeepStacks, LookAtStacks, Say, ShowStacks, TellWorkers
from elaunch.agent.core.events import Sampled, StacksTaken
from elaunch.agent.core.state import Agent, HeldEnd, Running, Step
from elaunch.agent.diagnosis import hang
from elaunch.agent.diagnosis.collectives import DEFAULT_GROUP
from elaunch.agent.diagnosis.hang import Standstill
from elaunch.agent.diagnosis.stack_groups import Stack, full_text, group_words, grouped, ranks_words
from elaunch.agent.diagnosis.waits import Doing, does_where, doing
from elaunch.agent.peer_lost import TIMED_OUT
from elaunch.rendezvous.rules.hang_verdict import Hang, StillNode, confirm_s, hang_words, tell_still
from elaunch.rendezvous.types import Failure, host_of

# Groups of equal stacks that the console shows; the others are in the file.
_GROUPS_SHOWN = 8


def sampled(agent: Agent, running: Running, event: Sampled, _now_s: float) -> Step:
    """Count how long all workers have stood still; take their stacks now and then; tell the leader of a change."""
    state, live = running.standstill, _awaited(running)
    if not agent.times.hang_after_s or _is_watched_otherwise(agent, running):
        return agent, ()
    is_alone = len(running.table.seats) == 1
    state = hang.after_windows(state, live, event.windows, is_alone=is_alone)
    looks: tuple[Action, ...] = ()
    if hang.wants_stacks(state, _limit(agent, running)):
        state = replace(state, is_looking=True)
        looks = (LookAtStacks(running.table.generation, live),)
    return _tell(agent, replace(running, standstill=state), looks)


def stacks_taken(agent: Agent, running: Running, event: StacksTaken, _now_s: float) -> Step:
    """Compare the stacks with those of the last look; tell the leader of a change."""
    seat = running.seat_of(agent.me.node_id)
    state = hang.after_stacks(running.standstill, event.stacks, seat.first_rank)
    return _tell(agent, replace(running, standstill=state), ())


def hear_of_hang(agent: Agent, running: Running) -> tuple[Running, tuple[Action, ...]]:
    """Say the leader's verdict once, with the stacks of this node's ranks; say that the job goes on after all."""
    state, hang, generation = running.standstill, agent.snapshot.hang, running.table.generation
    if hang is not None and hang.generation == generation:
        if hang.message == state.said:
            return running, ()
        said = replace(running, standstill=replace(state, said=hang.message))
        return said, _verdict(agent, running, hang)
    is_still_here = agent.snapshot.generation is not None and agent.snapshot.generation.number == generation
    # The end of the job wipes the verdict too.
    if not state.said or not is_still_here or agent.snapshot.ended:
        return running, ()
    healed_s = max(state.healed_s, state.spell_s)
    calm = replace(running, standstill=replace(state, said="", healed_s=healed_s))
    return calm, (Say("the job is no longer idle: a rank has made progress, or has exited"),)


def _is_watched_otherwise(agent: Agent, running: Running) -> bool:
    """Whether --hang-timeout finds a hang by what the workers report, or an end of theirs is being understood."""
    reports = agent.times.hang_timeout_s and running.quiet.reports
    return bool(reports or running.held or running.leaving_s)


def _awaited(running: Running) -> frozenset[int]:
    """The workers that others may wait for: a process whose program has ended comes to no collective any more."""
    return running.live - running.words.returned


def _limit(agent: Agent, running: Running) -> hang.HangLimit:
    return hang.HangLimit(agent.times.hang_after_s, confirm_s(agent.times, running.table))


def _tell(agent: Agent, running: Running, actions: tuple[Action, ...]) -> Step:
    seat, state = running.seat_of(agent.me.node_id), running.standstill
    awaited, limit = _awaited(running), _limit(agent, running)
    ended, is_lingering = frozenset(range(seat.slots)) - awaited, awaited != running.live
    if is_lingering and not awaited:
        record: StillNode | None = hang.ended_record(seat.node_id, seat.first_rank, ended, limit)
    else:
        place = (seat.node_id, seat.first_rank)
        record = hang.record_of(state, *place, ended, limit, is_lingering=is_lingering)
    if hang.is_news(state.told, record):
        txn = tell_still(agent.snapshot, agent.me, running.table.generation, record)
        running = replace(running, standstill=replace(state, told=record))
        actions = (*actions, Commit(txn))
    return replace(agent, phase=running), actions


def _verdict(agent: Agent, running: Running, hang: Hang) -> tuple[Action, ...]:
    generation, state, seat = running.table.generation, running.standstill, running.seat_of(agent.me.node_id)
    groups = grouped(state.stacks)
    lines = [f"  {group_words(group)}" for group in groups[:_GROUPS_SHOWN]]
    if len(groups) > _GROUPS_SHOWN:
        more = len(groups) - _GROUPS_SHOWN
        lines.append(f"  and {more} more {'group' if more == 1 else 'groups'}")
    is_failure = agent.restarts_hung and not hang.is_unawaited
    if not is_failure:
        lines += _ways_out(agent, running, hang)
    actions: list[Action] = [Say("\n".join([_headline(running, hang), *lines]), "warning")]
    if state.stacks:
        actions.append(KeepStacks(generation, full_text(state.stacks)))
    if hearing := _blind(running, state):
        actions.append(TellWorkers(generation, hearing, ShowStacks()))
    if is_failure and hang.node_id == seat.node_id:
        local_rank = hang.rank - seat.first_rank if hang.rank >= 0 else -1
        actions.append(Blame(generation, local_rank, hang.message, hang.is_blameless))
    return tuple(actions)


def _headline(running: Running, hang: Hang) -> str:
    seat = next((seat for seat in running.table.seats if seat.node_id == hang.node_id), None)
    return f"the job seems to hang: {hang_words(hang, seat.host if seat else host_of(hang.node_id))}"


def _ways_out(agent: Agent, running: Running, hang: Hang) -> list[str]:
    """What a person can type now, on this host."""
    job, spare = agent.called, agent.spec.max_restarts
    lines = [
        f"to let rank {each.rank} go on: kill -CONT {each.pid}" for each in running.standstill.stacks if each.is_stopped
    ]
    lines.append(f"to see all threads of all ranks: elaunch stacks {job}; to end the job: elaunch stop {job}")
    if spare:
        kill = f", or kill -9 {hang.pid} on {host_of(hang.node_id)} (it counts as a failure)" if hang.pid > 0 else ""
        lines.append(f"to restart the workers: elaunch restart {job}{kill}")
    if spare and not hang.is_unawaited:
        lines.append("to have hangs restarted without a person: start the job with --on-hang restart")
    return lines


def _blind(running: Running, state: Standstill) -> frozenset[int]:
    """Workers that can show their stacks themselves, where py-spy could not read all."""
    is_unread = not state.stacks or any(stack.trouble for stack in state.stacks)
    return running.live & running.words.hearing if is_unread else frozenset()


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
