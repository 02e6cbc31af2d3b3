"""A sick host in whole clusters: with --exclude-after a spare takes its place, and the job ends well."""

from __future__ import annotations

import random

import pytest

from elaunch.rendezvous.types import RankTable
from tests.harness import slow
from tests.sim.cluster import World, simulate
from tests.sim.plans import FOREVER_S, Fault, HostPlan, Plan, Strike

SEEDS = range(25)
EACH_SEED = [*SEEDS[:12], *map(slow, SEEDS[12:])]


def sick_host(seed: int, exclude_after: int = 3, *, spares: int = 1, kills: int = 0) -> Plan:
    """Three seats and spares; one host's workers fail soon after each start, for ever. Leaders may be killed."""
    rng = random.Random(seed)
    count = 3 + spares
    hosts = tuple(HostPlan(f"host-{index}", 1, again_s=0.5) for index in range(count))
    sick = Fault(0.5, Strike.SICK, rng.randrange(3), FOREVER_S)
    killed = [Fault(rng.uniform(2, 12), Strike.KILL_LEADER, number=rng.randint(1, 3)) for _ in range(kills)]
    return Plan(
        seed, hosts, 3, 3, max_restarts=8, exclude_after=exclude_after, work_s=40.0, listens=seed % 2 == 0,
        faults=(sick, *killed),
    )  # fmt: skip


def name_of_sick(world: World) -> str:
    (sick,) = [fault for fault in world.plan.faults if fault.what is Strike.SICK]
    return world.hosts[sick.host].name


def applied(world: World) -> list[RankTable]:
    return [table for table in world.checks.tables.values() if table.excluded]


@pytest.mark.parametrize("seed", EACH_SEED)
def test_a_sick_host_is_excluded_and_the_job_ends_well(seed: int) -> None:
    world = simulate(sick_host(seed))

    tables, sick = applied(world), name_of_sick(world)
    if not any(seat.host == sick for seat in world.checks.tables[0].seats):
        # It was the spare from the start.
        assert not tables
    else:
        assert tables
        assert all(each.who == sick for table in tables for each in table.excluded)
        assert all(seat.host != sick for table in tables for seat in table.seats)
        assert len([t for t in world.checks.tables.values() if any(s.host == sick for s in t.seats)]) == 3
    assert {process.outcome.exit_code for host in world.hosts for process in host.processes if process.outcome} == {0}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", EACH_SEED)
def test_it_stays_excluded_when_leaders_are_killed(seed: int) -> None:
    world = simulate(sick_host(seed, kills=2))

    assert Strike.KILL_LEADER in world.struck
    assert all(seat.host != name_of_sick(world) for table in applied(world) for seat in table.seats) or any(
        "too few other nodes" in table.reason for table in applied(world)
    )
