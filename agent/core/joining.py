"""Phase JOINING: no worker runs; the node enters the job, joins its generations, and waits for a seat."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Log, Spawn
from elaunch.agent.core.events import SnapshotChanged, StoreLost
from elaunch.agent.core.membership import outcome_in_store
from elaunch.agent.core.state import Agent, Finished, Joining, Running, Step, exit_with
from elaunch.rendezvous.rules.assign_ranks import newcomers_of, role_sizes
from elaunch.rendezvous.rules.form_generation import CAUSE
from elaunch.rendezvous.rules.restart_policy import exclusion_of
from elaunch.rendezvous.types import UNNAMED, OutcomeKind, RankTable


def snapshot_changed(agent: Agent, joining: Joining, _event: SnapshotChanged, _now_s: float) -> Step:
    """Start workers if the newest table seats this node, else wait as a spare; exit if the job has ended."""
    if outcome := outcome_in_store(agent):
        return exit_with(agent, outcome)
    generation = agent.snapshot.generation
    if generation and joining.joined == generation.number > joining.ran and agent.membership.is_member:
        return _take_seat(agent, agent.snapshot.current_table, joining)
    return agent, ()


def store_lost(agent: Agent, _: Joining | Finished, event: StoreLost, _now_s: float) -> Step:
    """Exit: this node cannot learn how the job ends."""
    return exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, event.why))


def _take_seat(agent: Agent, table: RankTable | None, joining: Joining) -> Step:
    """Start this node's workers, if the newest generation has a table that seats it."""
    if table is None:
        return agent, ()
    group_rank = table.group_rank(agent.me.node_id)
    if group_rank is None:
        if joining.spare_of == table.generation:
            return agent, ()
        logged = Log(f"generation {table.generation} runs without this node: {_why_seatless(agent, table)}")
        return replace(agent, phase=replace(joining, spare_of=table.generation)), (logged,)
    running = Running(table, frozenset(range(table.seats[group_rank].slots)), is_first=joining.ran < 0)
    # `elaunch status` needs the name on other hosts only.
    has_name = running.is_first and agent.spec.nodes_max > 1 and agent.spec.run_id != UNNAMED
    name = f"; job {agent.spec.run_id}" if has_name else ""
    logs = f"; output in {agent.logs}" if running.is_first and agent.logs else ""
    sizes = role_sizes(table.seats)
    roles = f"{', '.join(f'{count} {name}' for name, count in sizes.items())}; " if len(sizes) > 1 else ""
    reason, _, cause = table.reason.partition(CAUSE)
    if agent.last_failure is None or cause.partition(")")[0] != agent.last_failure.sentence.partition(")")[0]:
        # Otherwise the failure is logged already, perhaps with a cause that was found later.
        reason = table.reason
    started = Log(f"generation {table.generation}: {table.size_text} ({roles}{reason}{name}){logs}")
    differ = (Log(table.mismatch, "warning"),) if table.mismatch not in ("", agent.mismatch) else ()
    agent = replace(agent, phase=running, mismatch=table.mismatch)
    return agent, (started, *differ, Spawn(table, group_rank))


def _why_seatless(agent: Agent, table: RankTable) -> str:
    if exclusion := exclusion_of(agent.me.node_id, table.excluded):
        return f"it is excluded (--exclude-after), since {exclusion.why}; waiting in case too few others are left"
    if table.vacant and not newcomers_of(table, [agent.me], agent.spec.nodes_max):
        roles = " or ".join(dict.fromkeys(table.vacant))
        return f"the free seats are for nodes with the role {roles}; waiting as a spare"
    if len(table.seats) < agent.spec.nodes_max:
        # It came while that table formed, or was partitioned: the running nodes admit it at their next step boundary.
        again = agent.spec.max_restarts > 0
        return "it came too late; " + ("waiting for the next" if again else "with max_restarts 0 there is no other")
    seats = "1 seat is" if len(table.seats) == 1 else f"{len(table.seats)} seats are"
    return f"its {seats} taken; waiting as a spare"
