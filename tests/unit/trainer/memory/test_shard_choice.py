"""The choice of a snapshot that can be put together, and of the nodes for second copies."""

from __future__ import annotations

import pytest

from elaunch.trainer.memory.shard_choice import Choice, Piece, choose, mirrors


def pieces(generation: int, step: int, world_size: int, *ranks: int) -> list[Piece]:
    return [Piece(generation, step, world_size, rank) for rank in ranks]


def test_nothing_is_chosen_of_nothing() -> None:
    assert choose([]) is None
    assert choose([[], []]) is None


def test_the_newest_complete_one_wins() -> None:
    older, newer = pieces(0, 4, 2, 0, 1), pieces(0, 5, 2, 0, 1)

    assert choose([[*older, *newer]]) == Choice(0, 5, ((0,), (0,)))
    assert choose([[*older, newer[0]]]) == Choice(0, 4, ((0,), (0,)))


def test_a_newer_generation_wins_over_a_later_step() -> None:
    assert choose([[*pieces(1, 9, 1, 0), *pieces(2, 3, 1, 0)]]) == Choice(2, 3, ((0,),))


def test_pieces_come_from_any_node_and_all_holders_are_told() -> None:
    first, second = pieces(0, 5, 3, 0, 1), pieces(0, 5, 3, 1, 2)

    assert choose([first, first, second]) == Choice(0, 5, ((0, 1), (0, 1, 2), (2,)))


def test_pieces_of_different_world_sizes_do_not_make_one_snapshot() -> None:
    assert choose([[*pieces(0, 5, 3, 0), *pieces(0, 5, 2, 1)]]) is None


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", [None]),
        ("aa", [None, None]),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aab", [2, 2, 0]),
        ("abb", [1, 0, 0]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("abab", [1, 0, 3, 2]),
    ],
)
def test_the_second_copy_is_on_the_next_node(nodes: str, expected: list[int | None]) -> None:
    found = mirrors(list(nodes))

    assert found == expected
    assert all(mirror is None or nodes[mirror] != nodes[rank] for rank, mirror in enumerate(found))
