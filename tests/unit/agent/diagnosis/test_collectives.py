"""agent.diagnosis.collectives: what torch's flight recorder says, in the forms of gloo and of NCCL."""

from __future__ import annotations

import json

import pytest

from elaunch.agent.diagnosis.collectives import Count, is_stalled, last_entered, read_counts


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
        (dump(g0=(38, -1, 37)), ("in collective 38 of the default group", True)),
        (dump(g0=(37, -1, 37)), ("after collective 37 of the default group", False)),
        # On a GPU it is known whether the GPU has begun one.
        (dump(g0=(40, 38, 37)), ("in collective 40 of the default group", True)),
        (dump(g0=(38, 37, 37)), ("in collective 38 of the default group", True)),
        # In another group it waits, too; without a collective of the default group there are no words.
        (dump(g1=(5, -1, 4), g0=(7, -1, 7)), ("after collective 7 of the default group", True)),
        (dump(g1=(5, -1, 5), g0=(-1, -1, -1)), ("", False)),
        (b"", ("", False)),
    ],
)
def test_a_rank_is_in_or_after_its_last_collective(text: bytes, said: tuple[str, bool]) -> None:
    assert last_entered(read_counts(text)) == said


def test_stalled_is_who_waits_for_the_end_of_one_and_enters_no_other() -> None:
    waits, over = {(0, 0): Count(8, -1, 7)}, {(0, 0): Count(8, -1, 8)}
    # Some backends do not count ends.
    unknown = {(0, 0): Count(8, -1, -1)}

    assert is_stalled(waits, waits)
    assert not any(is_stalled(*pair) for pair in ((waits, over), (over, over), (unknown, unknown), ({}, {})))
    assert not is_stalled(waits, {(0, 0): Count(9, -1, 8)})
