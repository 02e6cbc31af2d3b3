"""Switches off each rule of the protocol that states its reason. The simulator must then find what the rule prevents.

rule that is off                                          what is found
a loss is guarded by both absences                        "lost": a node that has come back is declared lost
a finished node is no loss                                "lost": the others are restarted because of it
survivors are waited for (forming, rule 1)                "overlap": a table is sealed over workers that run
the lately ready are waited for (forming, rule 2)         "endless": a generation for each spare that is a bit late
only who has joined is a reason to open a generation      "endless": generations for nodes that never take a seat
a lost node is not counted (forming, rule 3)              "charged": its peers' failures are, to the budget
finished nodes stay until the end                         "deserted": a failure elsewhere finds no node to run with
the loop keeps the lease                                  "liveness": a wedged agent is waited for without end
the loop reads again what it watches                      "liveness": a deaf agent is waited for without end
who returns as a member guards the generation             "stale": a member runs workers of an older generation
a leader cut off declares no node lost at first           "outage": an absence of the store stops the workers
the leader renews the run's lease                         "exit code": a job that runs for long loses its keys
who starts a run too late ends the lease that it began    "unused lease": an empty one stays in the store for days

The rules themselves are in docs/protocol.md. Each hunt runs the same worlds also with the rule on, and finds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest

from elaunch.agent.core import membership
from elaunch.agent.core.state import Finished
from elaunch.agent.session.store_client import StoreClient
from elaunch.agent.session.store_view import StoreView
from elaunch.rendezvous.rules import form_generation, leader, transactions
from elaunch.rendezvous.store import Absent, Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Node, OpenKind, OutcomeKind
from tests.harness import slow
from tests.sim import agents
from tests.sim.agents import AgentProcess
from tests.sim.checks import Violation
from tests.sim.cluster import World, simulate
from tests.sim.plans import FOREVER_S, TIMES, Fault, HostPlan, Plan, Strike

WORLDS = 400
Switch = Callable[[pytest.MonkeyPatch], None]


def plan(seed: int, nodes: int, faults: list[Fault], **changes: Any) -> Plan:
    """A cluster of equal hosts, in which only `faults` go wrong."""
    hosts = tuple(HostPlan(f"host-{index}", 1) for index in range(nodes))
    quiet = Plan(seed, hosts, nodes, nodes, max_restarts=3, work_s=15.0, interleave=0.5, faults=tuple(faults))
    return replace(quiet, **changes)


# The worlds in which each rule is switched off.


def coming_back(rng: random.Random, seed: int) -> Plan:
    """Hosts are cut from the store for about a lease time. They come back, or finish meanwhile."""
    cuts = [
        Fault(rng.uniform(2, 14), Strike.STORELESS, rng.randrange(3), rng.uniform(2.4, 4.5)),
        Fault(rng.uniform(2, 14), Strike.STORELESS, rng.randrange(3), rng.uniform(2.4, 4.5)),
    ]
    return plan(seed, 3, cuts, work_s=rng.choice([4.0, 15.0]), call_s=0.2, watch_s=0.2, collective=False)


def just_back(rng: random.Random, seed: int) -> Plan:
    """One host comes back to the store at about the moment at which its lease ends."""
    cut = Fault(rng.uniform(3, 6), Strike.STORELESS, rng.randrange(3), rng.uniform(2.2, 3.4))
    return plan(seed, 3, [cut], call_s=0.2, watch_s=0.2, collective=False)


def dying_done(rng: random.Random, seed: int) -> Plan:
    """Agents die at any moment, also when their own workers have succeeded and others still run."""
    kills = [Fault(rng.uniform(1, 8), Strike.KILL, rng.randrange(3)) for _ in range(2)]
    return plan(seed, 3, kills, work_s=8.0, collective=False)


def slow_stops(rng: random.Random, seed: int) -> Plan:
    """Workers fail, the others are slow to end, and spares wait."""
    fails = [Fault(rng.uniform(1, 8), Strike.WORKER, rng.randrange(4)) for _ in range(3)]
    slow = [Fault(0.5, Strike.SLOW_CLEAR, rng.randrange(4), 4.0)]
    return plan(seed, 4, fails + slow, nodes_min=2, nodes_max=3, obedient=False, peers_blind=0.5)


def late_spares(rng: random.Random, seed: int) -> Plan:
    """Nothing fails, but one node comes later than the others, and learns of everything after them."""
    hosts = tuple(HostPlan(f"host-{index}", 1) for index in range(2))
    late = HostPlan("host-2", 1, start_s=rng.uniform(3, 5), behind_s=rng.uniform(0.2, 0.6))
    return plan(seed, 3, [], hosts=(*hosts, late), nodes_min=1, work_s=200.0)


def losing_peers(rng: random.Random, seed: int) -> Plan:
    """Agents are killed and hosts lost; their peers fail at once."""
    what = rng.choice([Strike.KILL, Strike.KILL, Strike.POWER])
    return plan(seed, 3, [Fault(rng.uniform(2, 8), what, rng.randrange(3), 30.0)], nodes_min=2)


def finishing_early(rng: random.Random, seed: int) -> Plan:
    """Some nodes' workers succeed long before those of other nodes, which fail."""
    fails = [Fault(rng.uniform(4, 9), Strike.WORKER, rng.randrange(3)) for _ in range(2)]
    return plan(seed, 3, fails, work_s=9.0, collective=False)


def wedged(rng: random.Random, seed: int) -> Plan:
    """One agent's loop hangs for ever, while its workers run on."""
    return plan(seed, 3, [Fault(rng.uniform(0.1, 5), Strike.WEDGE, rng.randrange(3), FOREVER_S)], nodes_min=2)


def deaf(rng: random.Random, seed: int) -> Plan:
    """Watches fall silent, and miss a change that they should report."""
    faults = [Fault(rng.uniform(0.1, 5), Strike.DEAF, rng.randrange(3)) for _ in range(3)]
    return plan(seed, 3, [*faults, Fault(rng.uniform(2, 6), Strike.WORKER, rng.randrange(3))])


def away_ending(rng: random.Random, seed: int) -> Plan:
    """The store is out of reach for longer than a lease, and nothing else goes wrong; another node waits to join."""
    hosts = [HostPlan(f"host-{index}", 1) for index in range(3)]
    hosts.append(HostPlan("host-3", 1, start_s=rng.uniform(5.0, 8.0)))
    # A node that comes in the last moments of the absence does not notice it, and may still begin a new run.
    away = [Fault(4.0, Strike.AWAY_ENDING, lasts_s=rng.uniform(5, 12))]
    return plan(seed, 4, away, hosts=tuple(hosts), nodes_min=3, nodes_max=4, work_s=25.0, loop_s=0.1)


def lasting(rng: random.Random, seed: int) -> Plan:
    """The job runs for longer than its keys stay without an agent, and leaders are lost."""
    kills = [Fault(rng.uniform(2, 20), Strike.KILL, rng.randrange(3)) for _ in range(2)]
    return plan(seed, 3, kills, nodes_min=1, work_s=60.0, times=replace(TIMES, keys_ttl_s=TIMES.keys_ttl_min_s))


def starting_together(_: random.Random, seed: int) -> Plan:
    """All agents come at once to run a job again that has ended."""
    return plan(seed, 4, [], call_s=0.2, watch_s=0.2, work_s=2.0, again=True)


# How each rule is switched off.


def losses_unguarded(patch: pytest.MonkeyPatch) -> None:
    def off(*args: Any) -> Txn:
        txn = opening(*args)
        return replace(txn, guards=tuple(guard for guard in txn.guards if not is_absence(guard)))

    def is_absence(guard: object) -> bool:
        return isinstance(guard, Absent) and ("/members/" in guard.key or "/done/" in guard.key)

    opening = leader.open_loss
    patch.setattr(leader, "open_loss", off)


def done_nodes_missed(patch: pytest.MonkeyPatch) -> None:
    losses_unguarded(patch)
    patch.setattr(leader, "_lost", lambda s, t, _: [x.node_id for x in t.seats if x.node_id not in s.members])


def survivors_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def off(snapshot: Any, *rest: Any) -> Any:
        joined = snapshot.joined.get(snapshot.generation.number, {})
        if len(joined) >= snapshot.terms.nodes_max:
            snapshot = replace(snapshot, members={n: m for n, m in snapshot.members.items() if n in joined})
        return form(snapshot, *rest)

    form = leader.form
    patch.setattr(leader, "form", off)


def ready_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(form_generation._Forming, "_await_ready", lambda *_: None)


def members_admitted(patch: pytest.MonkeyPatch) -> None:
    def off(snapshot: Any, table: Any, *rest: Any) -> Any:
        return admit(replace(snapshot, joined={table.generation: snapshot.members}), table, *rest)

    admit = leader._admit
    patch.setattr(leader, "_admit", off)
    patch.setattr(form_generation._Forming, "_await_ready", lambda *_: None)


def losses_counted(patch: pytest.MonkeyPatch) -> None:
    def off(formed: Any, table_age_s: float) -> Any:
        if formed.before:
            seated = {seat.node_id: Node(seat.node_id, seat.host, "", seat.slots) for seat in formed.before.seats}
            members = {**seated, **formed.snapshot.members}
            formed = replace(formed, snapshot=replace(formed.snapshot, members=members))
        return decide(formed, table_age_s)

    decide = form_generation._Forming.decide
    patch.setattr(form_generation._Forming, "decide", off)


def finished_leave(patch: pytest.MonkeyPatch) -> None:
    def off(agent: Any, event: Any, now_s: float) -> Any:
        agent, actions = step(agent, event, now_s)
        if isinstance(agent.phase, Finished):
            agent, more = membership.exit_with(agent, agent.outcome(OutcomeKind.SUCCEEDED, "this node is done"))
            actions = (*actions, *more)
        return agent, actions

    step = agents.step
    patch.setattr(agents, "step", off)


def lease_kept_by_itself(patch: pytest.MonkeyPatch) -> None:
    def off(process: AgentProcess, timer: int) -> None:
        if process.is_wedged and process.is_alive and process.client.tick(process.host.now_s()):
            process._requests.add_renewal()
            process._work_soon()
            process.world.later(0.8, lambda: off(process, timer))
        ring(process, timer)

    ring = AgentProcess._ring
    patch.setattr(AgentProcess, "_ring", off)


def not_read_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreView, "repair", lambda *_: None)


def return_unguarded(patch: pytest.MonkeyPatch) -> None:
    def off(*args: Any) -> Txn:
        return replace(transactions.return_as_member(*args), guards=())

    patch.setattr(membership, "return_as_member", off)


def no_return_grace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Times, "return_grace_s", property(lambda _: 0.0))


def run_not_renewed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreClient, "renew_run", lambda _: None)


def begun_leases_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreClient, "_revoke_unless_used", lambda *_, **__: None)


@dataclass(frozen=True)
class Hunt:
    """`switch` turns a rule off. Then at least one of `worlds` must raise a violation of `found`.

    The worlds of seeds below `first` are left out, since they show nothing.
    """

    switch: Switch
    worlds: Callable[[random.Random, int], Plan]
    found: str
    ignored: tuple[str, ...] = ()
    first: int = 0


HUNTS = [
    Hunt(losses_unguarded, coming_back, "lost"),
    Hunt(done_nodes_missed, dying_done, "lost", first=50),
    Hunt(survivors_not_awaited, slow_stops, "overlap", ("order", "charged")),
    Hunt(ready_not_awaited, late_spares, "endless"),
    Hunt(members_admitted, late_spares, "endless", ("join",)),
    Hunt(losses_counted, losing_peers, "charged"),
    Hunt(finished_leave, finishing_early, "deserted", ("exit code",)),
    Hunt(lease_kept_by_itself, wedged, "liveness"),
    Hunt(not_read_again, deaf, "liveness"),
    Hunt(return_unguarded, just_back, "stale", first=112),
    Hunt(no_return_grace, away_ending, "outage"),
    Hunt(run_not_renewed, lasting, "exit code"),
    Hunt(begun_leases_left, starting_together, "unused lease", first=22),
]


def lives(hunt: Hunt) -> Iterator[str | None]:
    """Run one world after the other. Yields the rule that was violated in each."""
    for seed in range(hunt.first, WORLDS):
        world = hunt.worlds(random.Random(seed), seed)
        try:
            lived = simulate(world, hunt.ignored)
        except Violation as violation:
            yield violation.rule
            continue
        yield "outage" if hunt.found == "outage" and not is_unharmed(lived) else None


def is_unharmed(world: World) -> bool:
    """Whether generations were opened only for a failure and newcomers, and no node had to come back as a new one."""
    kinds = [opened.kind for _, opened in world.checks.opened][1:]
    fails = sum(fault.what is Strike.WORKER for fault in world.plan.faults)
    names = {node_id for table in world.checks.tables.values() for node_id in (s.node_id for s in table.seats)}
    return kinds.count(OpenKind.FAIL) <= fails and {*kinds} <= {OpenKind.FAIL, OpenKind.JOIN} and len(names) <= 4


@pytest.mark.parametrize("hunt", HUNTS, ids=lambda hunt: hunt.switch.__name__)
def test_without_the_rule_the_simulator_finds_what_it_is_for(hunt: Hunt, monkeypatch: pytest.MonkeyPatch) -> None:
    hunt.switch(monkeypatch)

    assert hunt.found in lives(hunt)


@pytest.mark.thorough
@pytest.mark.parametrize("worlds", [2, slow(100)])
@pytest.mark.parametrize("hunt", HUNTS, ids=lambda hunt: hunt.switch.__name__)
def test_with_the_rule_nothing_is_found_in_the_same_worlds(hunt: Hunt, worlds: int) -> None:
    found = [rule for rule in islice(lives(hunt), worlds) if rule]

    assert not found
