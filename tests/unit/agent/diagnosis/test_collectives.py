"""agent.diagnosis.collectives: torch's flight recorder in the formats of gloo and of NCCL, and the shares of waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from elaunch.agent.diagnosis.collectives import (
    WINDOW_SAMPLES,
    Count,
    Counts,
    WaitShares,
    is_stalled,
    last_entered,
    read_counts,
    slow_rank,
    slow_text,
)

CPU, GPU = (0, 0), (1, 0)
Sample = Callable[[int], Mapping[int, Counts]]


def dump(**groups: tuple[int, int, int]) -> bytes:
    """A dump as torch 2.13 writes it; `g0=(entered, begun, ended)` is the status of group 0."""
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    status = {
        group.removeprefix("g"): dict(zip(names, map(str, numbers), strict=True)) for group, numbers in groups.items()
    }
    return json.dumps({"pg_status": status, "version": "2.10"}).encode()


def test_the_numbers_of_each_group_are_read_from_each_recorder() -> None:
    # A job on GPUs has two recorders, and groups of both have the same ids.
    text = dump(g1=(1, -1, 1), g0=(9, -1, 8)) + b"\n" + dump(g0=(38, 38, 37))

    assert read_counts(text) == {(0, 0): Count(9, -1, 8), (0, 1): Count(1, -1, 1), (1, 0): Count(38, 38, 37)}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        b'{"pg_status": []}',
        b'{"pg_status": {"x": {}}}',
        b'{"pg_status": {"0": {"last_enqueued_collective": "x"}}, "entries": 3}',
    ],
)
def test_of_another_form_nothing_is_read(text: bytes) -> None:
    assert read_counts(text) == {}


@pytest.mark.parametrize(
    ("text", "entered"),
    [
        (dump(g0=(38, -1, 37)), ("in collective 38 of the default group", True)),
        (dump(g0=(37, -1, 37)), ("after collective 37 of the default group", False)),
        # On a GPU it is known whether the GPU has begun one.
        (dump(g0=(40, 38, 37)), ("in collective 40 of the default group", True)),
        (dump(g0=(38, 37, 37)), ("in collective 38 of the default group", True)),
        # In another group it waits, too; without a collective of the default group the text is empty.
        (dump(g1=(5, -1, 4), g0=(7, -1, 7)), ("after collective 7 of the default group", True)),
        (dump(g1=(5, -1, 5), g0=(-1, -1, -1)), ("", False)),
        (b"", ("", False)),
    ],
)
def test_a_rank_is_in_or_after_its_last_collective(text: bytes, entered: tuple[str, bool]) -> None:
    assert last_entered(read_counts(text)) == entered


def test_stalled_is_who_waits_for_the_end_of_one_and_enters_no_other() -> None:
    waits, over = {(0, 0): Count(8, -1, 7)}, {(0, 0): Count(8, -1, 8)}
    # Some backends do not count ends.
    unknown = {(0, 0): Count(8, -1, -1)}

    assert is_stalled(waits, waits)
    assert not any(is_stalled(*pair) for pair in ((waits, over), (over, over), (unknown, unknown), ({}, {})))
    assert not is_stalled(waits, {(0, 0): Count(9, -1, 8)})


def after(sample: Sample, count: int = WINDOW_SAMPLES + 1) -> list[Mapping[int, float]]:
    """The shares after so many samples. The first has nothing to compare with."""
    state, found = WaitShares(), []
    for number in range(count):
        state, shares = state.after(sample(number))
        found += [shares] if shares else []
    return found


def gloo(number: int, waits: bool) -> Counts:
    """Ten collectives between two samples; the group of the second key has nothing to do with it."""
    entered = 10 * number + 10
    return {CPU: Count(entered, -1, entered - waits), (0, 7): Count(3, -1, 0)}


def test_the_share_is_that_of_the_samples_at_which_a_collective_has_not_ended() -> None:
    assert after(lambda number: {0: gloo(number, number % 4 != 0), 1: gloo(number, number % 4 == 0)}) == [
        {0: 0.75, 1: 0.25}
    ]


def test_there_are_shares_only_at_the_end_of_each_window() -> None:
    def sample(number: int) -> Mapping[int, Counts]:
        return {0: gloo(number, number > WINDOW_SAMPLES)}

    assert after(sample, WINDOW_SAMPLES) == []
    assert after(sample, 2 * WINDOW_SAMPLES + 1) == [{0: 0.0}, {0: 1.0}]


def test_on_a_gpu_a_rank_waits_from_the_begin_of_the_collective_and_not_from_its_entry() -> None:
    def sample(number: int) -> Mapping[int, Counts]:
        return {0: {GPU: Count(10 * number + 90, 10 * number + 11, 10 * number + 11 - number % 2)}}

    assert after(sample) == [{0: 0.5}]


@pytest.mark.parametrize(
    "sample",
    [
        lambda number: {0: gloo(number // 14, True)},
        lambda number: {0: {GPU: Count(10 * number + 90, -1, 10 * number)}},
        lambda number: {0: {CPU: Count(10 * number + 9, -1, -1)}},
        lambda number: {0: {(0, 7): Count(10 * number + 9, -1, 10 * number)}},
        lambda number: {0: gloo(number, True), **({1: gloo(number, True)} if number % 200 else {})},
        lambda _: {},
    ],
    ids=["a pause", "a GPU whose begins are not known", "no ends", "no default group", "a rank that goes", "no rank"],
)
def test_what_does_not_show_a_wait_gives_no_shares(sample: Sample) -> None:
    assert after(sample) == []


def test_ranks_that_enter_a_collective_at_every_tenth_sample_do_not_pause() -> None:
    assert after(lambda number: {0: gloo(number // 10, True), 1: gloo((number + 5) // 10, False)}) == [{0: 1.0, 1: 0.0}]


def test_a_rank_that_waits_for_less_of_the_time_than_all_others_is_slow() -> None:
    shares = {0: 0.62, 1: 0.05, 2: 0.7}

    assert slow_rank(shares) == 1
    assert slow_rank({**shares, 2: 0.19}) == -1
    assert slow_rank({0: 0.1}) == -1
    assert slow_text(11, 1, shares) == (
        "rank 11 is slower than the other ranks of this node: they waited in collectives for at least 62% of"
        " the last 480 s, and it for 5%",
        0.62,
    )
