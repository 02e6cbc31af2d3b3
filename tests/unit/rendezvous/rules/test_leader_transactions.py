"""rendezvous.rules.transactions: how the leader opens a generation, and the cause that it gives."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.transactions import hosts, open_join, open_loss
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import FailureKind, Generation, OpenKind
from tests.unit.agent.job_world import KEYS, A, B, C, World, node, running

# etcd's default for one transaction (--max-txn-ops), which counts comparisons too.


def opened(world: World) -> Generation:
    assert world.snapshot.generation
    return world.snapshot.generation


def test_a_member_key_that_was_made_again_meanwhile_is_a_node_that_lives() -> None:
    world = running(A, B, C)
    world.lose(B, C)
    loss = open_loss(world.snapshot, [B.node_id, C.node_id])
    world.join(C)

    assert not world.commit(loss)
    assert opened(world).number == 0


def test_nobody_misses_a_node_that_is_done() -> None:
    world = running(A, B)
    world.lose(B)
    loss = open_loss(world.snapshot, [B.node_id])
    world.write(Put(KEYS.done(0, B.node_id), ""))

    assert not world.commit(loss)


@pytest.mark.parametrize("what", ["another leads", "the generation moved", "the job ended"])
def test_a_generation_is_opened_by_who_leads_the_newest_of_a_job_that_lives(what: str) -> None:
    world = running(A, B, C)
    world.lose(C)
    both = [open_loss(world.snapshot, [C.node_id]), open_join(world.snapshot, [node("d").node_id])]
    if what == "another leads":
        world.write(Put(KEYS.leader, B.node_id))
    elif what == "the generation moved":
        world.fail(FailureKind.SIGNAL)
    else:
        world.write(Put(KEYS.ended, "x"))

    assert [world.commit(txn) for txn in both] == [False, False]


def test_a_join_needs_the_table_that_it_is_to_grow() -> None:
    world = running(A)
    world.join(B)
    join = open_join(world.snapshot, [B.node_id])

    assert world.commit(join)
    assert opened(world) == Generation(1, OpenKind.JOIN, "host-b joins")
    assert not world.commit(open_join(world.snapshot, [B.node_id])), "while that forms, no other joins"


def test_no_generation_is_opened_for_newcomers_once_a_node_is_done() -> None:
    world = running(A, B)
    world.join(C)
    join = open_join(world.snapshot, [C.node_id])
    world.finish(B)

    assert not world.commit(join)


def test_no_generation_is_opened_for_newcomers_that_have_gone_meanwhile() -> None:
    world = running(A, B)
    world.join(C)
    join = open_join(world.snapshot, [C.node_id])
    world.lose(C)

    assert not world.commit(join)


@pytest.mark.parametrize(
    ("kind", "forms", "cause"),
    [
        (OpenKind.LEAVE, True, "host-b leaves; host-c left too, or was lost"),
        (OpenKind.JOIN, True, "host-c was lost: no sign of life from the elaunch that ran there"),
        (OpenKind.LEAVE, False, "host-c was lost: no sign of life from the elaunch that ran there"),
    ],
    ids=["while it forms", "another kind", "after it was sealed"],
)
def test_who_is_gone_while_a_generation_forms_since_one_left_may_have_left_too(
    kind: OpenKind, forms: bool, cause: str
) -> None:
    world = running(A, B, C)
    number = 1 if forms else 0
    world.write(Put(KEYS.generation, encode(Generation(number, kind, "host-b leaves", B.node_id))))
    world.lose(C)

    assert world.commit(open_loss(world.snapshot, [C.node_id]))
    assert opened(world) == Generation(number + 1, OpenKind.LOSS, cause)


@pytest.mark.parametrize(
    ("letters", "names"),
    [
        ("a", "host-a"),
        ("cab", "host-a, host-b, host-c"),
        ("abcde", "host-a, host-b, host-c and 2 more"),
    ],
)
def test_hosts_are_named_in_order_and_not_all_of_very_many(letters: str, names: str) -> None:
    assert hosts([node(letter).node_id for letter in letters]) == names
