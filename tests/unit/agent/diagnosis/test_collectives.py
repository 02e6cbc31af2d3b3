"""agent.diagnosis.collectives: what torch's flight recorder says (gloo's and NCCL's), and how long each rank waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from elaunch.agent.diagnosis.collectives import (
    LOOKS,
    Count,
    Counts,
    LastEntered,
    WaitShares,
    is_stalled,
    last_entered,
    read_counts,
)


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
    ("text", "said"),
    [
        (dump(g0=(38, -1, 37)), LastEntered("in collective 38 of the default group", True, False)),
        (dump(g0=(37, -1, 37)), LastEntered("after collective 37 of the default group", False, False)),
        # On a GPU it is known whether the GPU has begun one.
        (dump(g0=(40, 38, 37)), LastEntered("in collective 40 of the default group", True, True)),
        (dump(g0=(38, 37, 37)), LastEntered("in collective 38 of the default group", True, False)),
        # In another group it waits, too; without a collective of the default group there are no words.
        (dump(g1=(5, -1, 4), g0=(7, -1, 7)), LastEntered("after collective 7 of the default group", True, False)),
        (dump(g1=(5, -1, 5), g0=(-1, -1, -1)), LastEntered("", False, False)),
        (b"", None),
    ],
)
def test_a_rank_is_in_or_after_its_last_collective(text: bytes, said: LastEntered | None) -> None:
    assert last_entered(read_counts(text)) == said


def test_stalled_is_who_waits_for_the_end_of_one_and_enters_no_other() -> None:
    waits, over = {(0, 0): Count(8, -1, 7)}, {(0, 0): Count(8, -1, 8)}
    # Some backends do not count ends.
    unknown = {(0, 0): Count(8, -1, -1)}

    assert is_stalled(waits, waits)
    assert not any(is_stalled(*pair) for pair in ((waits, over), (over, over), (unknown, unknown), ({}, {})))
    assert not is_stalled(waits, {(0, 0): Count(9, -1, 8)})


CPU, GPU = (0, 0), (1, 0)
Look = Callable[[int], Mapping[int, Counts]]


def after(looks: Look, count: int = LOOKS + 1) -> list[Mapping[int, float]]:
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
        return {0: gloo(look, look > LOOKS)}

    assert after(looks, LOOKS) == []
    assert after(looks, 2 * LOOKS + 1) == [{0: 0.0}, {0: 1.0}]


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
