"""The state from which a new group goes on, chosen from the contents of its nodes' memories."""

from __future__ import annotations

import dataclasses
import random

import pytest

from elaunch.trainer.memory.recovery_plan import (
    Decision,
    Held,
    Holding,
    Inventory,
    Record,
    RecordSource,
    choose,
    decide,
    decide_in_parts,
    digest_of,
    sentence,
)
from elaunch.trainer.state import Piece, Version

ROOM = 1 << 30


def node(
    name: str,
    *ranks: int,
    holds: tuple[tuple[int, int, int], ...] = (),
    records: tuple[tuple[int, int, int, bool], ...] = (),
    completed: tuple[int, int] | None = None,
    free: int = ROOM,
) -> list[Inventory]:
    """The inventories of a node's ranks; `holds` has (generation, step, checksum), `records` (rank, …, full)."""
    reporter = Inventory(
        rank=ranks[0],
        node=name,
        reports=True,
        holdings=tuple(Holding(Version(g, s), checksum, 100) for g, s, checksum in holds),
        records=tuple(Record(rank, Version(g, s), full) for rank, g, s, full in records),
        completed=None if completed is None else Version(*completed),
        free=free,
    )
    return [reporter, *(Inventory(rank, name, reports=False) for rank in ranks[1:])]


def decided(*nodes: list[Inventory], large: bool = False) -> Decision:
    decision = decide([inventory for its in nodes for inventory in its], large=large)
    assert decision is not None
    return decision


def own(*ranks: int, generation: int = 0, step: int, full: bool = False) -> tuple[tuple[int, int, int, bool], ...]:
    return tuple((rank, generation, step, full) for rank in ranks)


def test_who_has_no_memory_or_no_room_gets_it_rank_by_rank() -> None:
    none = [Inventory(0, "", reports=False), Inventory(1, "", reports=False)]
    decision = decided(none, node("old", 2, holds=((0, 5, 1),)), node("small", 3, 4, free=99))

    assert decision.receivers == (0, 1, 3, 4)
    assert decision.private == (0, 1, 3, 4)


def test_all_workers_killed_at_once_repeats_the_steps_since_the_snapshot() -> None:
    decision = decided(node("a", 0, 1, holds=((0, 50, 1), (0, 40, 1)), completed=(0, 57), records=own(0, 1, step=50)))

    assert decision.repeated == 7
    assert sentence(decision).startswith("restored step 50 from memory (of generation 0); 7 steps are repeated, since ")


def test_each_rank_continues_its_own_record_from_its_own_node_if_it_can() -> None:
    decision = decided(
        node("a", 0, 1, holds=((0, 5, 1),), records=(*own(0, 1, step=5), *own(3, step=5))),
        node("b", 2, 3, holds=((0, 5, 1),), records=(*own(2, 3, step=5), *own(3, step=6))),
    )

    sources = {rank: (source.of_rank, source.holder) for rank, source in decision.records.items()}
    assert sources == {0: (0, 0), 1: (1, 0), 2: (2, 2), 3: (3, 2)}
    assert decision.receivers == ()


def test_a_lost_record_is_replaced_by_the_lowest_ranks_buffers_and_logged() -> None:
    decision = decided(node("new", 0), node("old", 1, holds=((0, 5, 1),), records=own(1, 2, step=5)))

    assert decision.records == {0: RecordSource(1, 1, Version(0, 5)), 1: RecordSource(1, 1, Version(0, 5))}
    assert sentence(decision).endswith("; the random state of rank 0 is lost and reinitialized")


def test_a_lost_nodes_random_states_are_those_that_its_neighbour_has_of_the_last_snapshot() -> None:
    mirrored = own(1, step=4, full=True)
    decision = decided(node("new", 1), node("old", 0, holds=((0, 5, 1),), records=(*own(0, step=5), *mirrored)))

    assert decision.older == {1: RecordSource(1, 0, Version(0, 4))}
    assert sentence(decision).endswith("; the random state of rank 1 is that of step 4")


def test_a_lost_nodes_hook_state_goes_on_from_the_last_snapshot() -> None:
    new = node("new", 1)
    old = node("old", 0, holds=((0, 57, 1), (0, 50, 2)), records=(*own(0, 1, step=50, full=True), *own(0, step=57)))

    decision = decided(new, old, large=True)

    assert (decision.version, decision.reset, decision.older) == (Version(0, 50), False, {})
    assert decision.records[1] == RecordSource(1, 0, Version(0, 50))


def test_a_random_state_from_before_the_group_had_another_size_is_not_taken() -> None:
    # Four ranks in generation 0, three in generation 1, four again now.
    records = (*own(0, 1, 2, generation=1, step=9), *own(3, step=5, full=True))
    decision = decided(node("a", 0, 1, holds=((1, 9, 1),), records=records), node("b", 2), node("c", 3))

    assert (decision.older, decision.without_random_state) == ({}, (3,))


def test_a_large_part_takes_the_newest_step_of_which_every_record_is_there() -> None:
    a = node("a", 0, 1, holds=((0, 57, 1), (0, 50, 2)), records=(*own(0, step=57), *own(0, 1, step=50, full=True)))
    b = node("b", 2, holds=((0, 50, 2),), records=own(2, step=50, full=True), completed=(0, 57))

    decision = decided(a, b, large=True)

    assert (decision.version, decision.reset, decision.repeated) == (Version(0, 50), False, 7)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1)])
def test_a_large_part_that_is_lost_or_of_another_group_size_begins_anew(ranks: tuple[int, ...]) -> None:
    records = own(0, step=50, full=True) if len(ranks) == 2 else own(0, 1, step=50, full=True)
    decision = decided(node("a", *ranks, holds=((0, 57, 1), (0, 50, 2)), records=records), large=True)

    assert (decision.version, decision.reset) == (Version(0, 57), True)
    assert "the communication hook starts with a new state" in sentence(decision)


def decided_in_parts(*nodes: list[Inventory], pieces: dict[str, list[Held]]) -> Decision | None:
    """The decision if those pieces are on the nodes."""
    inventories = [inventory for its in nodes for inventory in its]
    names = [inventory.node for inventory in inventories]
    return decide_in_parts(inventories, choose({name: pieces.get(name, ()) for name in names}, names))


def pieces(step: int, parts: str, *ranks: int) -> list[Held]:
    return [
        Held(Piece(Version(0, step), len(parts), r), frozenset(parts[r]), digest_of(frozenset(parts))) for r in ranks
    ]


def test_a_sharded_state_goes_back_to_the_snapshot_that_the_nodes_have_all_of() -> None:
    a = node("a", 0, 1, records=(*own(0, 1, step=5, full=True), *own(0, step=8, full=True)), completed=(0, 11))
    b = node("b", 2, 3, records=own(2, 3, step=5, full=True))
    held = {"a": [*pieces(5, "abcd", 0, 1), *pieces(8, "abcd", 0, 1, 2)], "b": pieces(5, "abcd", 2, 3)}

    decision = decided_in_parts(a, b, pieces=held)

    assert decision is not None
    assert (decision.version, decision.receivers) == (Version(0, 5), ())
    assert decision.choice is not None
    assert decision.choice.holders == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    assert {rank: its.of_rank for rank, its in decision.records.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert "restored step 5 from memory (of generation 0, in parts); 6 steps are repeated" in sentence(decision)


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("layout", ["own", "replicas", "same"])
def test_what_lost_nodes_had_is_found_if_any_living_node_has_it(layout: str, lost: int) -> None:
    """Snapshots of steps 1 and 2, each piece also on the next node, and then nodes are lost at random."""
    dice = random.Random(36)
    for _ in range(300):
        count, each = dice.randint(2, 6), dice.randint(1, 3)
        ranks = count * each
        parts = {"own": "abcdefghijklmnopqr", "replicas": "abc"[:each] * count, "same": "a" * ranks}[layout][:ranks]
        gone = {dice.randrange(count) for _ in range(lost)}
        # Of the newer snapshot some pieces were not complete.
        unfinished = set(dice.sample(range(ranks), dice.randint(0, 1)))
        held: dict[str, list[Held]] = {}
        for place in range(count):
            for rank in range(ranks):
                if place not in gone and place in (rank // each, (rank // each + 1) % count):
                    newer = [] if rank in unfinished else pieces(2, parts, rank)
                    held.setdefault(str(place), []).extend([*pieces(1, parts, rank), *newer])
        nodes = [node(str(place), *range(place * each, (place + 1) * each)) for place in range(count)]

        decision = decided_in_parts(*nodes, pieces=held)

        def there(step: int, held: dict[str, list[Held]] = held) -> set[str]:
            each = [piece for its in held.values() for piece in its if piece.piece.version.step == step]
            return set().union(*(piece.parts for piece in each))

        whole = [step for step in (1, 2) if there(step) >= set(parts)]
        if not whole:
            assert decision is None
            # Two copies of each piece: only two lost neighbours have lost something.
            assert len(gone) == 2
            assert layout != "replicas" or count == 2
            continue
        assert decision is not None
        assert decision.choice is not None
        assert decision.version.step == max(whole)
        alive = {
            rank for place in range(count) if place not in gone for rank in range(place * each, (place + 1) * each)
        }
        for rank, holders in decision.choice.holders.items():
            assert set(holders) <= alive
            assert all(pieces(max(whole), parts, rank)[0] in held[str(holder // each)] for holder in holders)
        covered = set().union(*(frozenset(parts[rank]) for rank in decision.choice.holders))
        assert covered == set(parts)


def test_pieces_of_different_world_sizes_do_not_make_one_snapshot() -> None:
    held = {"a": [*pieces(5, "abc", 0), *pieces(5, "ab", 1)]}

    assert decided_in_parts(node("a", 0, 1), pieces=held) is None


def test_every_rank_decides_the_same_whatever_is_there() -> None:
    dice = random.Random(6)
    for _ in range(500):
        inventories: list[Inventory] = []
        for name in range(dice.randint(1, 4)):
            ranks = range(len(inventories), len(inventories) + dice.randint(1, 3))
            copies = dice.randint(0, 2)
            holds = tuple((dice.randint(0, 2), dice.randint(1, 3), dice.randint(0, 1)) for _ in range(copies))
            inventories += node(str(name), *ranks, holds=holds, free=dice.choice([0, ROOM]))

        decision = decide(inventories)

        held = {h.version for i in inventories for h in i.holdings}
        if not held:
            assert decision is None
            continue
        assert decision is not None
        assert decision.version == max(held)
        source = inventories[decision.source]
        checksum = next(h.checksum for h in source.holdings if h.version == decision.version)
        # A rank that gets nothing has the state already, or shares the memory of a rank that has or gets it.
        served = {inventories[rank].node for rank in decision.receivers}
        for inventory in inventories:
            has = any((h.version, h.checksum) == (decision.version, checksum) for h in inventory.holdings)
            reporter = next(i for i in inventories if i.node == inventory.node and i.reports)
            node_has = any((h.version, h.checksum) == (decision.version, checksum) for h in reporter.holdings)
            assert inventory.node in served or node_has
            assert not (has and inventory.rank in decision.receivers)
        assert decision.source not in decision.receivers
        assert dataclasses.replace(decision) == decide(inventories)
