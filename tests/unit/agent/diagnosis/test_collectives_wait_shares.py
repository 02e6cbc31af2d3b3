"""agent.diagnosis.collectives: for which share of the time each rank waits in collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from elaunch.agent.diagnosis.collectives import WINDOW_SAMPLES, Count, Counts, WaitShares, slow_rank, slow_text

CPU, GPU = (0, 0), (1, 0)
Look = Callable[[int], Mapping[int, Counts]]


def after(looks: Look, count: int = WINDOW_SAMPLES + 1) -> list[Mapping[int, float]]:
    """The shares after so many looks. The first look has nothing to compare with."""
    state, found = WaitShares(), []
    for number in range(count):
        state, shares = state.after(looks(number))
        found += [shares] if shares else []
    return found


def gloo(look: int, waits: bool) -> Counts:
    """Ten collectives between two looks; the group of the second key has nothing to do with it."""
    number = 10 * look + 10
    return {CPU: Count(number, -1, number - waits), (0, 7): Count(3, -1, 0)}


def test_the_share_is_that_of_the_looks_at_which_a_collective_has_not_ended() -> None:
    assert after(lambda look: {0: gloo(look, look % 4 != 0), 1: gloo(look, look % 4 == 0)}) == [{0: 0.75, 1: 0.25}]


def test_there_are_shares_only_at_the_end_of_each_window() -> None:
    def looks(look: int) -> Mapping[int, Counts]:
        return {0: gloo(look, look > WINDOW_SAMPLES)}

    assert after(looks, WINDOW_SAMPLES) == []
    assert after(looks, 2 * WINDOW_SAMPLES + 1) == [{0: 0.0}, {0: 1.0}]


def test_on_a_gpu_a_rank_waits_from_the_begin_of_the_collective_and_not_from_its_entry() -> None:
    def looks(look: int) -> Mapping[int, Counts]:
        return {0: {GPU: Count(10 * look + 90, 10 * look + 11, 10 * look + 11 - look % 2)}}

    assert after(looks) == [{0: 0.5}]


@pytest.mark.parametrize(
    "looks",
    [
        lambda look: {0: gloo(look // 14, True)},
        lambda look: {0: {GPU: Count(10 * look + 90, -1, 10 * look)}},
        lambda look: {0: {CPU: Count(10 * look + 9, -1, -1)}},
        lambda look: {0: {(0, 7): Count(10 * look + 9, -1, 10 * look)}},
        lambda look: {0: gloo(look, True), **({1: gloo(look, True)} if look % 200 else {})},
        lambda _: {},
    ],
    ids=["a pause", "a GPU whose begins are not known", "no ends", "no default group", "a rank that goes", "nobody"],
)
def test_what_says_nothing_about_waiting_gives_no_shares(looks: Look) -> None:
    assert after(looks) == []


def test_ranks_that_enter_a_collective_at_every_tenth_look_do_not_pause() -> None:
    assert after(lambda look: {0: gloo(look // 10, True), 1: gloo((look + 5) // 10, False)}) == [{0: 1.0, 1: 0.0}]


def test_a_rank_that_waits_for_less_of_the_time_than_all_others_is_slow() -> None:
    shares = {0: 0.62, 1: 0.05, 2: 0.7}

    assert slow_rank(shares) == 1
    assert slow_rank({**shares, 2: 0.19}) == -1
    assert slow_rank({0: 0.1}) == -1
    assert slow_text(11, 1, shares) == (
        "rank 11 is slower than the other ranks of this node: they wait in collectives for 62% of the time and more,"
        " and it for 5%, for the last 480 s",
        0.62,
    )
