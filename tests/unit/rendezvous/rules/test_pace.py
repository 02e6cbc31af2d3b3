"""rendezvous.rules.pace: which node all others wait for, by shares of the time and without a common clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.rules.pace import (
    CONFIRM_S,
    NodePace,
    SlowNode,
    check_pace,
    declare_slow,
    is_news,
    pace_of,
    slow_node,
    slow_node_words,
    tell_pace,
)
from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.job_world import A, B, C, World, running

# A has one rank, B two, C three.
SHARES_A, SHARES_B, SHARES_C = {0: 0.5}, {1: 0.52, 2: 0.46}, {3: 0.48, 4: 0.5, 5: 0.55}
EQUAL = {A: SHARES_A, B: SHARES_B, C: SHARES_C}


def verdict(shares: dict[object, dict[int, float]]) -> SlowNode | None:
    paces = {each.node_id: pace_of(each.node_id, said) for each, said in shares.items()}  # type: ignore[attr-defined]
    return slow_node(paces, running(A, B, C).table)


def tell(world: World, shares: dict[object, dict[int, float]]) -> None:
    for each, said in shares.items():
        pace = pace_of(each.node_id, said)  # type: ignore[attr-defined]
        assert world.commit(tell_pace(world.snapshot, each, world.number, pace))  # type: ignore[arg-type]


def test_a_rank_that_waits_less_than_all_others_is_named() -> None:
    slow = verdict({**EQUAL, C: {3: 0.48, 4: 0.1, 5: 0.55}})

    assert slow == SlowNode(0, C.node_id, 4, is_whole=False, waits=0.1, others=0.46)
    assert slow_node_words(slow) == (
        "rank 4 on host-c is slower than the ranks of the other nodes: those wait in collectives for 46% of the time or"
        " more, and it for 10%"
    )


def test_a_node_whose_ranks_all_wait_less_is_named_as_a_whole() -> None:
    slow = verdict({**EQUAL, C: {3: 0.2, 4: 0.1, 5: 0.15}})

    assert slow == SlowNode(0, C.node_id, 4, is_whole=True, waits=0.1, others=0.46)
    assert slow_node_words(slow).startswith("all ranks of host-c are slower than the ranks of the other nodes: those")
    alone = verdict({**EQUAL, A: {0: 0.1}})
    assert alone
    assert not alone.is_whole, "the one rank of its node"


@pytest.mark.parametrize(
    "shares",
    [
        EQUAL,
        {**EQUAL, C: {3: 0.48, 4: 0.33, 5: 0.55}},
        {**EQUAL, A: {0: 0.1}, C: {3: 0.48, 4: 0.12, 5: 0.55}},
        {A: SHARES_A, C: {3: 0.48, 4: 0.1, 5: 0.55}},
        {A: {0: 0.02}, B: {1: 0.0, 2: 0.1}, C: {3: 0.1, 4: 0.05, 5: 0.01}},
    ],
    ids=["equal", "a little less", "slow ones on two nodes", "a node has said nothing", "nobody waits"],
)
def test_else_nobody_is_named(shares: dict[object, dict[int, float]]) -> None:
    assert verdict(shares) is None


def test_the_leader_declares_it_once_when_it_has_held_for_long() -> None:
    world = running(A, B, C)
    tell(world, {**EQUAL, C: {3: 0.48, 4: 0.1, 5: 0.55}})

    led = world.look()
    assert (led.txn, led.wake_s) == (None, world.now_s + CONFIRM_S)
    world.now_s += CONFIRM_S
    assert world.lead()

    slow = world.snapshot.slow
    assert slow
    assert (slow.node_id, slow.rank) == (C.node_id, 4)
    assert (world.look().txn, world.look().wake_s) == (None, None)


def test_another_slow_node_takes_the_time_anew_and_replaces_the_verdict() -> None:
    world = running(A, B, C)
    tell(world, {**EQUAL, C: {3: 0.1, 4: 0.1, 5: 0.1}})
    world.look()
    world.now_s += CONFIRM_S
    assert world.lead()

    tell(world, {**EQUAL, A: {0: 0.1}})
    assert not world.lead()
    world.now_s += CONFIRM_S
    assert world.lead()

    assert world.snapshot.slow
    assert world.snapshot.slow.node_id == A.node_id


def test_a_gap_that_closes_in_time_is_no_verdict() -> None:
    world = running(A, B, C)
    tell(world, {**EQUAL, A: {0: 0.1}})
    world.look()
    tell(world, EQUAL)
    world.look()
    tell(world, {**EQUAL, A: {0: 0.1}})

    world.now_s += CONFIRM_S
    assert not world.lead()


def test_a_new_generation_begins_without_shares_and_without_a_verdict() -> None:
    world = running(A, B, C)
    tell(world, {**EQUAL, A: {0: 0.1}})
    world.look()
    world.now_s += CONFIRM_S
    assert world.lead()
    late = declare_slow(world.snapshot, SlowNode(0, B.node_id, 1, is_whole=False, waits=0.1, others=0.9))

    world.fail(FailureKind.SIGNAL)
    assert not world.commit(late)
    assert not world.commit(tell_pace(replace(world.snapshot, generation=None), A, 0, pace_of(A.node_id, SHARES_A)))
    world.run(A, B, C)

    assert (world.snapshot.slow, dict(world.snapshot.pace)) == (None, {})


TOLD = NodePace("a", 3, 0.30, 0.60)


@pytest.mark.parametrize(
    ("told", "now", "said"),
    [
        (None, TOLD, True),
        (TOLD, TOLD, False),
        (TOLD, replace(TOLD, least=0.34, most=0.57), False),
        (TOLD, replace(TOLD, least=0.2), True),
        (TOLD, replace(TOLD, most=0.7), True),
        (TOLD, replace(TOLD, rank=4), True),
        (replace(TOLD, most=0.31), replace(TOLD, rank=4, most=0.31), False),
    ],
)
def test_a_node_says_it_again_only_if_something_has_changed(told: NodePace | None, now: NodePace, said: bool) -> None:
    assert is_news(told, now) is said


@pytest.mark.parametrize(
    "record",
    [
        replace(TOLD, rank=-1),
        replace(TOLD, least=float("nan")),
        replace(TOLD, least=0.7),
        replace(TOLD, most=1.1),
        replace(TOLD, node_id="a\x1b[2J"),
        SlowNode(-1, "a", 0, is_whole=False, waits=0.1, others=0.5),
        SlowNode(0, "a", 0, is_whole=False, waits=0.6, others=0.5),
    ],
)
def test_a_record_that_no_node_writes_is_refused(record: NodePace | SlowNode) -> None:
    with pytest.raises(ValueError, match=r"out of|no name"):
        check_pace(record)
