"""What a node does about ranks that hang."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Action, Blame, Commit, KeepStacks, Log, NotifyWorkers, ShowStacks, TakeStacks
from elaunch.agent.core.events import Sampled, StacksTaken
from elaunch.agent.core.state import Agent, Running, Step
from elaunch.agent.diagnosis import hang
from elaunch.agent.diagnosis.hang import HangState
from elaunch.agent.diagnosis.stack_groups import full_text, group_text, grouped
from elaunch.rendezvous.rules.hang_verdict import Hang, confirm_s, hang_sentence, report_idle
from elaunch.rendezvous.types import host_of

# Groups of equal stacks that the console shows; the others are in the file.
_GROUPS_SHOWN = 8


def sampled(agent: Agent, running: Running, event: Sampled, _now_s: float) -> Step:
    """Count how long all workers have stood still; take their stacks now and then; tell the leader of a change."""
    state, live = running.hang_state, _awaited(running)
    # An end that is being understood is no hang.
    if not agent.times.hang_after_s or running.held or running.leaving:
        return agent, ()
    state = hang.after_windows(state, live, event.windows)
    looks: tuple[Action, ...] = ()
    if hang.wants_stacks(state, _limit(agent, running)):
        state = replace(state, is_sampling=True)
        looks = (TakeStacks(running.table.generation, live),)
    return _tell(agent, replace(running, hang_state=state), looks)


def stacks_taken(agent: Agent, running: Running, event: StacksTaken, _now_s: float) -> Step:
    """Compare the stacks with those of the last look, and tell the leader of a change."""
    seat = running.seat_of(agent.me.node_id)
    state = hang.after_stacks(running.hang_state, event.stacks, seat.first_rank)
    return _tell(agent, replace(running, hang_state=state), ())


def hear_of_hang(agent: Agent, running: Running) -> tuple[Running, tuple[Action, ...]]:
    """Log the leader's verdict once, with the stacks of this node's ranks; say that the job goes on after all."""
    state, hang, generation = running.hang_state, agent.snapshot.hang, running.table.generation
    if hang is not None and hang.generation == generation:
        if hang.message == state.logged:
            return running, ()
        said = replace(running, hang_state=replace(state, logged=hang.message))
        return said, _verdict(agent, running, hang)
    is_still_here = agent.snapshot.generation is not None and agent.snapshot.generation.number == generation
    # The end of the job wipes the verdict too.
    if not state.logged or not is_still_here or agent.snapshot.ended:
        return running, ()
    calm = replace(running, hang_state=replace(state, logged=""))
    return calm, (Log("the job is no longer idle: a rank has made progress, or has exited"),)


def _awaited(running: Running) -> frozenset[int]:
    """The workers that others may wait for: a process whose program has ended comes to no collective any more."""
    return running.live - running.words.returned


def _limit(agent: Agent, running: Running) -> hang.HangLimit:
    return hang.HangLimit(agent.times.hang_after_s, confirm_s(agent.times, running.table))


def _tell(agent: Agent, running: Running, actions: tuple[Action, ...]) -> Step:
    seat, state = running.seat_of(agent.me.node_id), running.hang_state
    record = hang.record_of(state, seat, running.live, _awaited(running), _limit(agent, running))
    if hang.has_changed(state.recorded, record):
        txn = report_idle(agent.snapshot, agent.me, running.table.generation, record)
        running = replace(running, hang_state=replace(state, recorded=record))
        actions = (*actions, Commit(txn))
    return replace(agent, phase=running), actions


def _verdict(agent: Agent, running: Running, hang: Hang) -> tuple[Action, ...]:
    generation, state, seat = running.table.generation, running.hang_state, running.seat_of(agent.me.node_id)
    lines = [f"  {group_text(group)}" for group in grouped(state.stacks)[:_GROUPS_SHOWN]]
    is_failure = agent.restarts_hung and not hang.is_unawaited
    if not is_failure:
        lines += _ways_out(agent, running, hang)
    actions: list[Action] = [Log("\n".join([_headline(running, hang), *lines]), "warning")]
    if state.stacks:
        actions.append(KeepStacks(generation, full_text(state.stacks)))
    if hearing := _blind(running, state):
        actions.append(NotifyWorkers(generation, hearing, ShowStacks()))
    if is_failure and hang.node_id == seat.node_id:
        local_rank = hang.rank - seat.first_rank if hang.rank >= 0 else -1
        actions.append(Blame(generation, local_rank, hang.message, round(state.idle_s), hang.is_blameless))
    return tuple(actions)


def _headline(running: Running, hang: Hang) -> str:
    seat = next((seat for seat in running.table.seats if seat.node_id == hang.node_id), None)
    return f"the job seems to hang: {hang_sentence(hang, seat.host if seat else host_of(hang.node_id))}"


def _ways_out(agent: Agent, running: Running, hang: Hang) -> list[str]:
    """What a person can type now, on this host."""
    stopped = [each for each in running.hang_state.stacks if each.is_stopped]
    lines = [f"to let rank {each.rank} go on: kill -CONT {each.pid}" for each in stopped]
    lines.append(f"to see all threads: elaunch stacks {agent.called}; to end the job: elaunch stop {agent.called}")
    if agent.spec.max_restarts:
        always = "" if hang.is_unawaited else ", or start the job with --on-hang restart"
        lines.append(f"to restart the workers: elaunch restart {agent.called}{always}")
    return lines


def _blind(running: Running, state: HangState) -> frozenset[int]:
    """Workers that can show their stacks themselves, where py-spy could not read all."""
    is_unread = not state.stacks or any(stack.trouble for stack in state.stacks)
    return running.live & running.words.hearing if is_unread else frozenset()
