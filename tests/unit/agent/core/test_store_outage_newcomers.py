"""agent.core.membership: what an agent makes of a store that was away, and of what it finds on its return."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.events import StoreAway, StoreBack, Tick
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.store import Put
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
