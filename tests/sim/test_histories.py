"""Worlds in which the product once failed. The simulator found each by a seed; each is cut down to what matters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.types import OpenKind
from tests.sim.agents import KEYS
from tests.sim.cluster import simulate
from tests.sim.plans import TIMES, Fault, HostPlan, Plan, Strike

HOSTS = tuple(HostPlan(f"host-{index}", 1) for index in range(3))
# Longer than any life here.
KEPT = replace(TIMES, keys_ttl_s=3600.0)


def plan(seed: int, *faults: Fault, **changes: object) -> Plan:
    quiet = Plan(seed, HOSTS[:2], 2, 2, work_s=8.0, faults=faults)
    return replace(quiet, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_an_agent_that_slept_while_its_workers_ended_well_is_not_done_in_a_generation_of_long_ago(seed: int) -> None:
    sleeps = (Fault(2.0 + seed / 5, Strike.STOP, 0, 12.0), Fault(4.0 + seed / 2, Strike.LEAVE, 1))

    simulate(plan(seed, *sleeps, nodes_min=1, collective=False, watch_s=0.3, call_s=0.1))


@pytest.mark.parametrize("seed", range(20))
def test_a_newcomer_in_the_last_moment_does_not_make_a_finished_node_run_again(seed: int) -> None:
    late = replace(HOSTS[2], start_s=2.0 + seed / 20)

    simulate(plan(seed, hosts=(*HOSTS[:2], late), nodes_min=1, nodes_max=3, work_s=1.0, call_s=0.05, watch_s=0.2))


@pytest.mark.parametrize("seed", range(5))
def test_a_job_runs_again_on_its_old_id_though_the_watch_is_slower_than_the_response(seed: int) -> None:
    world = simulate(plan(seed, again=True, work_s=1.0, watch_s=0.5, call_s=0.001))

    kinds = [opened.kind for _, opened in world.checks.opened]
    assert kinds == [OpenKind.START, OpenKind.START]
    assert [process.outcome and process.outcome.exit_code for h in world.hosts for process in h.processes] == [0] * 4


@pytest.mark.parametrize(("seed", "away_at_s"), [(155, 6.5), (355, 6.5), (393, 6.3)])
def test_an_agent_that_loses_its_lease_before_it_starts_a_new_run_does_not_end_with_the_old_one(
    seed: int, away_at_s: float
) -> None:
    away = Fault(away_at_s, Strike.AWAY_ENDING, 0, 4.0)

    simulate(plan(seed, away, hosts=HOSTS[:1], nodes_min=1, nodes_max=1, again=True, work_s=2.0, call_s=0.4))


def test_members_of_which_no_generation_stands_do_not_make_agents_try_without_a_pause() -> None:
    world = simulate(plan(0, Fault(0.0, Strike.GARBAGE, number=0)))

    assert world.store.read(KEYS.root).entries
    assert all(process.outcome for host in world.hosts for process in host.processes)


@pytest.mark.parametrize("seed", range(10))
def test_a_newcomer_that_waited_for_the_store_does_not_begin_a_run_over_nodes_that_waited_too(seed: int) -> None:
    hosts = (*HOSTS[:2], replace(HOSTS[2], start_s=5.0 + seed / 10))
    away = Fault(4.0, Strike.AWAY_ENDING, 0, 8.0)

    world = simulate(plan(seed, away, hosts=hosts, nodes_max=3, work_s=25.0))

    assert [opened.kind for _, opened in world.checks.opened].count(OpenKind.START) == 1


@pytest.mark.parametrize("seed", range(10))
def test_no_node_is_evicted_for_the_time_that_the_store_was_away(seed: int) -> None:
    faults = (Fault(3.0, Strike.WORKER, 0), Fault(3.0 + seed / 10, Strike.AWAY, lasts_s=14.0))

    world = simulate(plan(seed, *faults, obedient=False, peers_blind=1.0, work_s=25.0))

    assert len({seat.node_id for table in world.checks.tables.values() for seat in table.seats}) == 2


@pytest.mark.parametrize("seed", range(5))
def test_of_a_job_whose_agents_were_all_killed_nothing_stays(seed: int) -> None:
    kills = [Fault(5.0 + seed / 10, Strike.KILL, host) for host in range(2)]

    world = simulate(plan(seed, Fault(2.0, Strike.WORKER), *kills, work_s=60.0, times=KEPT))

    left = set(world.store.read(KEYS.root).entries)
    assert {KEYS.spec, KEYS.generation} < left
    world.now_s += KEPT.keys_ttl_s
    world.advance_store()
    assert not world.store.read(KEYS.root).entries


@pytest.mark.parametrize("seed", range(5))
def test_a_job_that_was_killed_goes_on_while_its_keys_are_there(seed: int) -> None:
    kills = [Fault(3.0 + seed / 10, Strike.KILL, host) for host in range(2)]

    world = simulate(plan(seed, *kills, again=True, times=KEPT))

    # An agent that comes within the lease time of agents that died goes on with their run.
    assert [opened.number for _, opened in world.checks.opened] == [0, 1]
    assert world.checks.run.ended


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_of_a_job_that_has_ended_is_its_outcome_and_goes_too(seed: int) -> None:
    fails = [Fault(2.0 + at_s, Strike.WORKER, at_s) for at_s in range(2)]

    world = simulate(plan(seed, *fails, work_s=12.0, times=KEPT))

    left = world.store.read(KEYS.root).entries
    newest = max(world.checks.tables)
    assert {KEYS.spec, KEYS.generation, KEYS.ended, KEYS.table(newest)} <= set(left)
    assert len([key for key in left if "/failures/" in key]) == 1
    assert len(left) == 5
    world.now_s += KEPT.keys_ttl_s
    world.advance_store()
    assert not world.store.read(KEYS.root).entries
