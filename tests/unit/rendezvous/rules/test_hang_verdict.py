"""rendezvous.rules.hang_verdict: when a whole job hangs, and which rank is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules.hang_verdict import (
    Hang,
    IdleGroup,
    IdleNode,
    IdleReason,
    confirm_s,
    hang_sentence,
    verdict_on,
)
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import RankTable, Seat

A, B = "node-a-00000001", "node-b-00000002"
TABLE = RankTable(4, (Seat(A, 2, 0), Seat(B, 2, 2)), "10.0.0.1", 1234, "it starts")
NONE: frozenset[str] = frozenset()


def group(kind: IdleReason, ranks: str, does: str, first: int, count: int = 1) -> IdleGroup:
    return IdleGroup(kind, first, count, ranks, f"place of {does}", does)


def waits(ranks: str, first: int, count: int = 1, call: str = "all_reduce") -> IdleGroup:
    return group(IdleReason.WAITS, ranks, f"waits in {call}", first, count)


def node(node_id: str, *groups: IdleGroup, ready: bool = True, exited: str = "", exited_rank: int = -1) -> IdleNode:
    return IdleNode(node_id, 63.2 if node_id == A else 90.0, ready, groups, exited, exited_rank)


def verdict(*nodes: IdleNode, done: frozenset[str] = NONE, has_limit: bool = False) -> Hang | None:
    return verdict_on({each.node_id: each for each in nodes}, TABLE, done, has_limit=has_limit)


BOTH = node(A, waits("ranks 0, 1", 0, 2)), node(B, waits("ranks 2, 3", 2, 2))
LOOP = group(IdleReason.RUNS, "rank 3", "runs in spin (train.py:12)", 3)


def test_a_node_that_works_or_may_go_on_by_itself_keeps_all_from_hanging() -> None:
    waiting = node(A, waits("ranks 0, 1", 0, 2))
    reading = group(IdleReason.ELSEWHERE, "ranks 2, 3", "waits for /mnt/x", 2, 2)

    assert verdict(waiting) is None
    assert verdict(waiting, node(B, reading, ready=False)) is None
    assert verdict(waiting, node(B, reading)) == Hang(
        4, B, 2, "hung: it waits for /mnt/x (as does 1 more), while ranks 0, 1 wait in all_reduce, for 63 s,"
    )


def test_who_is_elsewhere_is_named_and_not_who_waits() -> None:
    assert verdict(BOTH[0], node(B, waits("rank 2", 2), LOOP)) == Hang(
        4, B, 3, "hung: it runs in spin (train.py:12), while ranks 0, 1, 2 wait in all_reduce, for 63 s,"
    )


def test_a_stopped_rank_is_named_before_one_that_runs_and_that_before_one_at_a_lock() -> None:
    stopped = group(IdleReason.STOPPED, "rank 1", "is stopped", 1)
    lock = group(IdleReason.STUCK, "rank 0", "waits for a lock", 0)

    both = verdict(node(A, lock, stopped), node(B, waits("rank 2", 2), LOOP))
    one = verdict(node(A, lock, waits("rank 1", 1)), node(B, waits("rank 2", 2), LOOP))

    assert both
    assert (both.node_id, both.rank) == (A, 1)
    assert one
    assert (one.node_id, one.rank) == (B, 3)
    assert one.message == (
        "hung: it runs in spin (train.py:12), while ranks 1, 2 wait in all_reduce, rank 0 waits for a lock, for 63 s,"
    )


def test_of_two_collectives_the_one_with_fewer_ranks_is_named() -> None:
    other = node(B, waits("rank 2", 2, call="broadcast"), waits("rank 3", 3))

    hang = verdict(BOTH[0], other)

    assert hang == Hang(4, B, 2, "hung: it waits in broadcast, while ranks 0, 1, 3 wait in all_reduce, for 63 s,")


LOCK = group(IdleReason.STUCK, "rank 0", "waits for a lock", 0)
BLIND = group(IdleReason.UNKNOWN, "rank 3", "uses no CPU (no Python frame)", 3)


@pytest.mark.parametrize(
    ("nodes", "is_blameless"),
    [
        # Two against two, and one against one: which is named is only their order.
        ((BOTH[0], node(B, waits("ranks 2, 3", 2, 2, call="broadcast"))), True),
        ((node(A, waits("rank 0", 0)), node(B, waits("rank 2", 2, call="broadcast"))), True),
        # One of three, and a loop: these differ from all others.
        ((BOTH[0], node(B, waits("rank 2", 2, call="broadcast"), waits("rank 3", 3))), False),
        ((BOTH[0], node(B, waits("rank 2", 2), LOOP)), False),
        # The same on both nodes, whether at one line or at two.
        ((node(A, waits("rank 0", 0), LOOP), node(B, waits("rank 2", 2), LOOP)), True),
        (
            (
                node(A, LOCK, waits("rank 1", 1)),
                node(B, waits("rank 2", 2), replace(LOCK, where="other", first_rank=3)),
            ),
            True,
        ),
        (
            (
                node(A, waits("rank 0", 0, call="broadcast"), waits("rank 1", 1)),
                node(B, waits("rank 2", 2, call="broadcast"), waits("rank 3", 3), waits("rank 4", 4)),
            ),
            True,
        ),
        # It may wait as the others do: only its stack cannot be read.
        ((BOTH[0], node(B, waits("rank 2", 2), BLIND)), True),
        # No rank waits for it.
        ((node(A, LOCK), node(B, group(IdleReason.ELSEWHERE, "rank 2", "sleeps", 2))), True),
        (BOTH, True),
        ((node(A, waits("rank 0", 0), exited="rank 1", exited_rank=1), BOTH[1]), True),
    ],
)
def test_only_a_rank_that_differs_from_the_others_is_evidence_against_its_node(
    nodes: tuple[IdleNode, ...], is_blameless: bool
) -> None:
    hang = verdict(*nodes)

    assert hang
    assert hang.is_blameless is is_blameless


@pytest.mark.parametrize(("places", "text"), [(5, ", for 63 s"), (7, ", and 2 more groups")])
def test_of_many_places_the_first_are_named_and_the_others_counted(places: int, text: str) -> None:
    each = [waits(f"rank {rank}", rank, call=f"call_{rank}") for rank in range(places)]
    hang = verdict(node(A, *each), node(B, each[0]))

    assert hang
    assert text in hang.message


def test_where_all_ranks_are_alike_none_is_named() -> None:
    hang = verdict(*BOTH)

    assert hang
    assert (hang.node_id, hang.rank) == (A, -1)
    assert hang.message.startswith("hung: all 4 ranks wait in all_reduce for 63 s and no rank is anywhere else")


@pytest.mark.parametrize(
    ("nodes", "done", "rank", "text"),
    [
        (
            (node(A, waits("rank 0", 0), exited="rank 1", exited_rank=1), BOTH[1]),
            NONE,
            1,
            "exited with code 0, while ranks 0, 2, 3 wait in all_reduce, for 63 s,",
        ),
        (
            (IdleNode(A, 60.0, True, (), "ranks 0, 1", 0, is_lingering=True), BOTH[1]),
            NONE,
            0,
            "and others (ranks 0, 1) reached the end of the program, while ranks 2, 3 wait in all_reduce, for 60 s,",
        ),
        (
            (BOTH[0],),
            frozenset({B}),
            -1,
            "hung: all ranks of node-b exited with code 0, while ranks 0, 1 wait in all_reduce, for 63 s,",
        ),
    ],
)
def test_a_rank_that_exited_with_0_is_named_if_all_others_wait(
    nodes: tuple[IdleNode, ...], done: frozenset[str], rank: int, text: str
) -> None:
    hang = verdict(*nodes, done=done)

    assert hang
    assert (hang.rank, hang.message) == (rank, text)


@pytest.mark.parametrize("kind", [IdleReason.STUCK, IdleReason.ELSEWHERE, IdleReason.RUNS, IdleReason.STOPPED])
def test_programs_that_do_not_wait_for_each_other_hang_only_by_a_limit_of_the_user(kind: IdleReason) -> None:
    alike = (group(kind, "ranks 0, 1", "serves", 0, 2), group(kind, "ranks 2, 3", "serves", 2, 2))

    assert verdict(node(A, alike[0]), node(B, alike[1])) is None
    hang = verdict(node(A, alike[0]), node(B, alike[1]), has_limit=True)
    assert hang
    assert (hang.rank, hang.message) == (0, "hung: it serves (as do 3 more), for 63 s,")


@pytest.mark.parametrize("kind", [IdleReason.STUCK, IdleReason.ELSEWHERE, IdleReason.UNKNOWN])
def test_the_last_rank_that_stands_still_after_all_others_ended_is_named_but_no_failure(kind: IdleReason) -> None:
    last = replace(group(kind, "rank 1", "waits for a child process", 1), pid=77)
    hang = verdict(node(A, last, exited="rank 0", exited_rank=0), done=frozenset({B}))

    assert hang
    assert (hang.rank, hang.pid, hang.is_unawaited) == (1, 77, True)
    assert hang.message == "hung: it waits for a child process, for 63 s, after rank 0 exited with code 0,"
    assert hang_sentence(hang, "node-a").startswith("rank 1 (pid 77 on node-a) waits for a child process")
    # One that others wait for is.
    awaited = verdict(node(A, last, waits("rank 0", 0)), done=frozenset({B}))
    assert awaited
    assert not awaited.is_unawaited


def test_programs_that_have_all_ended_hang_in_no_collective() -> None:
    assert verdict(*(IdleNode(each, 60.0, True, (), "ranks 0, 1", 0, is_lingering=True) for each in (A, B))) is None


def test_where_no_stack_can_be_read_it_is_known_only_that_no_rank_uses_a_cpu() -> None:
    why = "uses no CPU (py-spy is not installed)"
    blind = (
        node(A, group(IdleReason.UNKNOWN, "ranks 0, 1", why, 0, 2)),
        node(B, group(IdleReason.UNKNOWN, "ranks 2, 3", why, 2, 2)),
    )

    hang = verdict(*blind)

    assert hang
    assert hang.rank == -1
    assert hang.message == "hung: all 4 ranks use no CPU (py-spy is not installed), for 63 s,"


def test_records_are_read_back_and_checked() -> None:
    record = BOTH[0]

    assert decode(IdleNode, encode(record)) == record
    assert decode(Hang, encode(Hang(4, A, 0, "two\nlines"))).message == "two\\x0alines"
    for bad in (
        IdleNode(A, -1.0, True, ()),
        IdleNode(A, 1.0, True, (), exited_rank=-2),
        node(A, waits("ranks 0", -1)),
        Hang(-1, A, 0, ""),
    ):
        with pytest.raises(ValueError, match="range"):
            decode(type(bad), encode(bad))


def test_a_verdict_on_several_nodes_must_hold_for_a_while() -> None:
    times = Times(hang_after_s=15.0)

    assert confirm_s(times, TABLE) == 5.0
    assert confirm_s(times, replace(TABLE, seats=TABLE.seats[:1])) == 0.0
