"""The choice of a snapshot that can be put together from the pieces of the living nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elaunch.trainer.memory.recovery_plan import Choice, Held, choose, digest_of
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
