"""The data order: a pure function of seed and step, whoever computes it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elaunch.trainer.order import permuted, share_of, windows_of_step


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_every_window_is_drawn_once_per_epoch(count: int) -> None:
    drawn = [permuted(index, count, key=99) for index in range(count)]

    assert sorted(drawn) == list(range(count))


def test_a_permutation_mixes() -> None:
    drawn = [permuted(index, 1000, key=5) for index in range(1000)]

    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(drawn))
    assert neighbours < 20


def test_steps_walk_through_an_epoch_without_gap_or_repetition() -> None:
    drawn = [w for step in range(1, 11) for w in windows_of_step(step, seed=3, global_batch=6, windows=60)]

    assert sorted(drawn) == list(range(60))


def test_the_next_epoch_has_another_order() -> None:
    first = windows_of_step(1, seed=3, global_batch=60, windows=60)
    second = windows_of_step(2, seed=3, global_batch=60, windows=60)

    assert first != second
    assert sorted(first) == sorted(second)


def test_a_step_depends_on_seed_and_step_alone() -> None:
    at_once = windows_of_step(40, seed=3, global_batch=6, windows=1000)
    for step in range(40):
        windows_of_step(step + 1, seed=3, global_batch=6, windows=1000)

    assert windows_of_step(40, seed=3, global_batch=6, windows=1000) == at_once
    assert windows_of_step(40, seed=4, global_batch=6, windows=1000) != at_once
    # The order is part of what a run directory holds: no release may change it unnoticed.
    assert at_once == [202, 770, 164, 522, 874, 12]


def test_a_text_with_fewer_windows_than_a_batch_is_read_several_times() -> None:
    assert sorted(windows_of_step(1, seed=0, global_batch=6, windows=2)) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_ranks_shares_are_the_global_batch_cut_in_contiguous_parts(world_size: int) -> None:
    drawn = windows_of_step(7, seed=1, global_batch=12, windows=5000)

    shares = [share_of(drawn, rank, world_size) for rank in range(world_size)]

    assert [window for share in shares for window in share] == drawn
    assert {len(share) for share in shares} == {12 // world_size}
