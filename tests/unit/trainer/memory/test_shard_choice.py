"""The choice of a snapshot that can be put together from the pieces of the living nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elaunch.trainer.memory.shard_choice import Choice, Held, choose, digest_of
from elaunch.trainer.state.version import Piece, Version


def pieces(generation: int, step: int, parts: str, *ranks: int) -> list[Held]:
    """The pieces of those ranks; `parts` has one letter for each rank of the group: the part that it holds."""
    snapshot = Version(generation, step)
    return [
        Held(Piece(snapshot, len(parts), rank), frozenset(parts[rank]), digest_of(frozenset(parts))) for rank in ranks
    ]


def chosen(inventories: Sequence[Iterable[Held]]) -> Choice | None:
    """The choice of ranks that have a node each, with these pieces."""
    return choose({str(rank): held for rank, held in enumerate(inventories)}, [*map(str, range(len(inventories)))])


def test_nothing_is_chosen_of_nothing() -> None:
    assert chosen([]) is None
    assert chosen([[], []]) is None


def test_the_newest_complete_one_wins() -> None:
    older, newer = pieces(0, 4, "ab", 0, 1), pieces(0, 5, "ab", 0, 1)

    assert chosen([[*older, *newer]]) == Choice(Version(0, 5), 2, {0: (0,), 1: (0,)})
    assert chosen([[*older, newer[0]]]) == Choice(Version(0, 4), 2, {0: (0,), 1: (0,)})


def test_a_newer_generation_wins_over_a_later_step() -> None:
    assert chosen([[*pieces(1, 9, "a", 0), *pieces(2, 3, "a", 0)]]) == Choice(Version(2, 3), 1, {0: (0,)})


def test_pieces_come_from_any_node_and_all_holders_are_told() -> None:
    first, second = pieces(0, 5, "abc", 0, 1), pieces(0, 5, "abc", 1, 2)

    assert chosen([first, first, second]) == Choice(Version(0, 5), 3, {0: (0, 1), 1: (0, 1, 2), 2: (2,)})


def test_pieces_of_different_world_sizes_do_not_make_one_snapshot() -> None:
    assert chosen([[*pieces(0, 5, "abc", 0), *pieces(0, 5, "ab", 1)]]) is None


def test_a_replica_has_the_parts_of_a_lost_rank() -> None:
    # HSDP: two replicas of two shards each, on one node each.
    assert chosen([pieces(0, 5, "abab", 2, 3)]) == Choice(Version(0, 5), 4, {2: (0,), 3: (0,)})
    assert chosen([pieces(0, 5, "abab", 0), pieces(0, 5, "abab", 3)]) == Choice(Version(0, 5), 4, {0: (0,), 3: (1,)})
    assert chosen([pieces(0, 5, "abab", 0, 2)]) is None


def test_one_piece_of_a_state_that_all_ranks_have_is_whole() -> None:
    assert chosen([[], pieces(0, 5, "aaa", 1), pieces(0, 5, "aaa", 2)]) == Choice(Version(0, 5), 3, {1: (1,)})


def test_a_part_that_all_ranks_have_is_in_one_piece_of_each_node() -> None:
    # ZeRO-1 on two nodes: rank 0 and 2 have the weights, each rank has its share of the moments.
    whole = digest_of("w0123")

    def held(rank: int, parts: str) -> Held:
        return Held(Piece(Version(0, 5), 4, rank), frozenset(parts), whole)

    nodes = [held(0, "w0"), held(1, "1")], [held(2, "w2"), held(3, "3")]

    every = chosen(nodes)
    assert every is not None
    assert list(every.holders) == [0, 1, 2, 3]
    # The second node and its mirror of the first one's own parts.
    assert chosen([[held(1, "1"), *nodes[1]]]) is None
    assert chosen([[held(0, "0"), held(1, "1"), *nodes[1]]]) is not None


def test_a_state_without_tensors_is_its_plain_values() -> None:
    assert chosen([[Held(Piece(Version(0, 5), 1, 0), frozenset(), digest_of(()))]]) == Choice(
        Version(0, 5), 1, {0: (0,)}
    )


def test_ranks_of_one_node_hold_its_pieces_together() -> None:
    first, second = pieces(0, 5, "abcd", 0, 1), pieces(0, 5, "abcd", 2, 3)

    choice = choose({"x": first, "y": second}, ["x", "y", "x", "y"])

    assert choice == Choice(Version(0, 5), 4, {0: (0, 2), 1: (0, 2), 2: (1, 3), 3: (1, 3)})
