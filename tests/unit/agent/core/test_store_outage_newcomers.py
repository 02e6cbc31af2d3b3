"""agent.core.membership: what an agent makes of a store that was away, and of what it finds on its return."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.events import StoreAway, StoreBack, Tick
from elaunch.agent.core.membership import RUNS_REFUSED_MAX
from elaunch.agent.core.state import Joining
from elaunch.agent.core.step import deadline_s
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.store import Delete, Put
from elaunch.rendezvous.types import Generation, Node, OpenKind
from tests.unit.agent.driver import KEYS, SPEC, TIMES, Driver, cleared

TWO_NODES = replace(SPEC, nodes_min=2, nodes_max=2)


def leading_two() -> tuple[Driver, Driver]:
    """Two nodes run generation 0; the first one leads."""
    one = Driver(TWO_NODES, slots=1)
    other = Driver(TWO_NODES, store=one.store, host="node-b", slots=1)
    for driver in (one, other):
        driver.begin().settle()
    for driver in (one, other):
        driver.settle()
    assert one.snapshot.current_table
    assert one.agent.leads
    return one, other


def test_a_leader_that_was_cut_off_gives_the_others_time_to_join_before_it_evicts_anybody() -> None:
    one, other = leading_two()
    one.exits(0, 3)
    one.happen(cleared(0))
    one.settle()

    one.happen(StoreAway("nobody answers"))
    one.now_s += TIMES.form_deadline_s + 1
    one.happen(Tick())
    one.happen(StoreBack())
    one.look()

    assert other.node_id in one.snapshot.members


def test_a_newcomer_that_waited_for_the_store_starts_no_run_over_one_whose_members_were_away_too() -> None:
    newcomer = Driver(remote=True)
    newcomer.write(Put(KEYS.generation, encode(Generation(3, OpenKind.JOIN, "node-b joins"))))
    newcomer.happen(StoreAway("nobody answers"))
    newcomer.begin().settle()
    newcomer.happen(StoreBack())
    newcomer.settle()
    before = newcomer.snapshot.generation

    # A node that ran this generation is back: it writes its member key, and leads.
    member = KEYS.member("node-b-1")
    newcomer.write(Put(member, encode(Node("node-b-1", "node-b", "10.0.0.2", 1))), Put(KEYS.leader, "node-b-1"))
    newcomer.settle()

    assert before
    assert before.number == 3
    assert newcomer.node_id in newcomer.snapshot.joined[3]


def test_a_newcomer_starts_a_run_over_one_whose_members_do_not_come_back() -> None:
    newcomer = Driver(remote=True)
    newcomer.write(Put(KEYS.generation, encode(Generation(3, OpenKind.JOIN, "node-b joins"))), Delete(KEYS.leader))
    newcomer.happen(StoreAway("nobody answers"))
    newcomer.begin().settle()
    newcomer.happen(StoreBack())
    assert isinstance(newcomer.agent.phase, Joining)

    due_s = deadline_s(newcomer.agent)
    assert due_s is not None
    newcomer.now_s = max(newcomer.now_s, due_s) + TIMES.return_grace_s
    newcomer.happen(Tick())
    newcomer.settle()

    assert newcomer.snapshot.generation
    assert newcomer.snapshot.generation.kind is OpenKind.START


def test_a_store_that_comes_and_goes_does_not_make_a_newcomer_give_up_a_run_that_it_cannot_see_yet() -> None:
    """Each refused try to start a run stands for a lease time, however often the store is back meanwhile."""
    newcomer = Driver(remote=True)
    other = Node("node-b-1", "node-b", "10.0.0.2", 1)
    newcomer.write(Put(KEYS.member(other.node_id), encode(other)))
    newcomer.begin().settle()
    newcomer.now_s = newcomer.agent.membership.run_again_s
    newcomer.happen(Tick())
    newcomer.settle()
    refused = newcomer.agent.membership.runs_refused

    for _ in range(2 * RUNS_REFUSED_MAX):
        newcomer.happen(StoreAway("no answer came in time"))
        newcomer.now_s += 0.1
        newcomer.happen(StoreBack())
        newcomer.happen(Tick())
        newcomer.settle()

    assert refused == 1
    assert newcomer.agent.membership.runs_refused == 1
    assert isinstance(newcomer.agent.phase, Joining)
    assert newcomer.agent.lead_at_s == newcomer.agent.membership.run_again_s
