"""Roles in whole clusters: a lost node's seat is for a node of its role, and a job waits for a role that nobody has."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elaunch.rendezvous.types import OutcomeKind, RankTable
from tests.harness import slow
from tests.sim.cluster import World, simulate
from tests.sim.plans import FOREVER_S, Fault, HostPlan, Plan, Strike

SEEDS = range(60)
EACH_SEED = [*SEEDS[:10], *map(slow, SEEDS[10:])]


def hosts(*roles: str) -> tuple[HostPlan, ...]:
    return tuple(HostPlan(f"host-{index}", 1, role=role) for index, role in enumerate(roles))


def losing(lost: int, plan: Plan) -> Plan:
    """The power of a host fails, for ever."""
    return replace(plan, faults=(*plan.faults, Fault(5.0, Strike.POWER, lost, FOREVER_S)))


def job(*roles: str, seats: int, nodes_min: int | None = None, late: tuple[int, float] | None = None) -> Plan:
    """A job of `seats` seats with a host of each role; the host of the number `late[0]` starts at `late[1]` s."""
    here = hosts(*roles)
    # The first ones get the seats.
    here = tuple(replace(host, start_s=0.0 if i < seats else 3.0) for i, host in enumerate(here))
    if late:
        here = tuple(replace(host, start_s=late[1]) if i == late[0] else host for i, host in enumerate(here))
    return Plan(0, here, seats if nodes_min is None else nodes_min, seats, work_s=20.0)


def roles(world: World, table: RankTable) -> list[str]:
    return [seat.role for seat in table.seats]


def ends(world: World) -> set[OutcomeKind]:
    return {run.ended.kind for run in world.checks.runs if run.ended}


def test_an_elastic_job_goes_on_with_fewer_nodes_of_a_role_and_keeps_the_seat_for_it() -> None:
    plan = job("ps", "trainer", "trainer", "ps", "trainer", seats=3, nodes_min=1, late=(4, 15.0))
    world = simulate(losing(2, plan))

    # The second ps comes before, and gets no seat.
    assert [roles(world, table) for table in world.checks.tables.values()] == [
        ["ps", "trainer", "trainer"],
        ["ps", "trainer"],
        ["ps", "trainer", "trainer"],
    ]
    assert ends(world) == {OutcomeKind.SUCCEEDED}


def random_job(seed: int) -> Plan:
    """Two roles, spares of both, and hosts of which some are lost and come back."""
    rng = random.Random(seed)
    names = ["ps", "trainer", "trainer", rng.choice(["ps", "trainer"]), "ps", "trainer"]
    there = tuple(
        replace(host, again_s=rng.uniform(0.1, 3.0), start_s=rng.choice([0.0, rng.uniform(0, 6)]))
        for host in hosts(*names)
    )
    kinds = [Strike.POWER, Strike.KILL, Strike.WORKER, Strike.LEAVE, Strike.KILL_LEADER, Strike.STORELESS]
    faults = [Fault(rng.uniform(2, 30), rng.choice(kinds), rng.randrange(6), rng.uniform(2, 8)) for _ in range(6)]
    seats = rng.choice([3, 4])
    nodes_min = rng.choice([1, 2, seats])
    return Plan(seed, there, nodes_min, seats, max_restarts=12, work_s=30.0, faults=tuple(faults))


@pytest.mark.parametrize("seed", EACH_SEED)
def test_seats_keep_their_roles_whatever_is_lost(seed: int) -> None:
    world = simulate(random_job(seed))

    assert world.checks.tables
