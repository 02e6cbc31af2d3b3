"""The tree of ranks: who passes what on to whom."""

from __future__ import annotations

import pytest

from elaunch.trainer.ranks.tree import below, children, parent


def depth(rank: int) -> int:
    up = parent(rank)
    return 0 if up is None else 1 + depth(up)


@pytest.mark.parametrize("world_size", [1, 2, 7, 8, 9, 63, 64, 65, 100, 513, 1024])
def test_every_rank_is_below_rank_0_once_and_the_ranks_below_a_child_follow_each_other(world_size: int) -> None:
    for rank in range(world_size):
        under = [each for child in children(rank, world_size) for each in below(child, world_size)]

        assert [rank, *under] == list(below(rank, world_size))
        assert all(parent(child) == rank for child in children(rank, world_size))


@pytest.mark.parametrize(
    ("world_size", "deep", "wide"), [(2, 1, 1), (8, 1, 7), (64, 2, 14), (1024, 4, 22), (16384, 5, 31)]
)
def test_the_tree_stays_flat_and_rank_0_has_few_children(world_size: int, deep: int, wide: int) -> None:
    assert max(map(depth, range(world_size))) == deep
    assert len(children(0, world_size)) == wide


def test_with_eight_ranks_per_node_seven_of_eight_connections_stay_within_a_node() -> None:
    across = [rank for rank in range(1, 1024) if rank // 8 != (parent(rank) or 0) // 8]

    assert len(across) == 1024 // 8 - 1
