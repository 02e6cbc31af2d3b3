"""agent.diagnosis.collectives: what torch's flight recorder says, in the forms of gloo and of NCCL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from elaunch.agent.diagnosis.collectives import (
    DEFAULT_GROUP,
    Collective,
    Count,
    evidence,
    is_stalled,
    read_counts,
    read_entries,
)


def entry(
    number: int, name: str = "all_reduce", group: str = "0", state: str = "scheduled", **more: Any
) -> dict[str, Any]:
    """One entry as torch 2.13 writes it, without the fields that elaunch does not read."""
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "profiling_name": f"gloo:{name}",
        "state": state,
        "time_created_ns": number * 1_000_000_000,
        **more,
    }


def dump(entries: Sequence[dict[str, Any]], **groups: tuple[int, int, int]) -> bytes:
    """A dump of these entries; `g0=(entered, begun, ended)` is the status of group 0."""
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    status = {
        group.removeprefix("g"): dict(zip(names, map(str, numbers), strict=True)) for group, numbers in groups.items()
    }
    return json.dumps({"entries": list(entries), "pg_status": status, "version": "2.10"}).encode()


def words(*texts: bytes) -> list[str]:
    found = evidence({rank: read_entries(text) for rank, text in enumerate(texts)})
    return [found[rank].words for rank in sorted(found)]


def test_the_numbers_of_each_group_are_read_from_each_recorder() -> None:
    # A job on GPUs has two recorders, and groups of both have the same ids.
    text = dump([], g1=(1, -1, 1), g0=(9, -1, 8)) + b"\n" + dump([], g0=(38, 38, 37))

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
        b'{"entries": [1, {}, {"is_p2p": false, "pg_id": 0, "process_group": []}, null]}',
    ],
)
def test_of_another_form_nothing_is_read(text: bytes) -> None:
    assert (read_counts(text), read_entries(text)) == ({}, ())


def test_entries_have_the_group_the_number_the_name_and_the_time_and_messages_are_left_out() -> None:
    text = dump([entry(7), entry(7, "send", is_p2p=True), entry(2, "barrier", group="1")], g0=(8, -1, 7), g1=(2, -1, 2))

    assert read_entries(text) == (
        Collective(DEFAULT_GROUP, 7, "all_reduce", 7.0, has_begun=False, is_outstanding=True),
        Collective("group 1", 2, "barrier", 2.0, has_begun=False, is_outstanding=False),
    )


def test_a_rank_that_is_one_collective_behind_and_one_in_another_are_told_with_numbers_and_names() -> None:
    ahead = dump([entry(37), entry(38)], g0=(38, -1, 37))
    behind = dump([entry(36), entry(37)], g0=(37, -1, 37))
    elsewhere = dump([entry(37), entry(38, "broadcast")], g0=(38, -1, 37))

    assert words(ahead, behind, elsewhere) == [
        "in collective 38 of the default group (all_reduce)",
        "after collective 37 of the default group (all_reduce)",
        "in collective 38 of the default group (broadcast)",
    ]


def test_another_group_is_named_only_where_ranks_differ_in_it() -> None:
    default = entry(5)
    alike = [dump([default, entry(9, group="1")], g0=(5, -1, 5), g1=(9, -1, 8))] * 2
    apart = dump([default, entry(8, "all_gather", group="1")], g0=(5, -1, 5), g1=(8, -1, 8))

    assert words(*alike) == ["after collective 5 of the default group (all_reduce)"] * 2
    assert words(alike[0], apart)[1].endswith(" and after collective 8 of group 1 (all_gather)")


def test_on_a_gpu_a_collective_that_is_complete_is_over_and_one_that_runs_has_begun() -> None:
    done, runs, queued = entry(37, state="completed"), entry(38, state="started"), entry(38)
    found = evidence(
        {
            0: read_entries(dump([done, runs], g0=(38, 38, 37))),
            1: read_entries(dump([done, queued], g0=(38, -1, 37))),
            2: read_entries(dump([done], g0=(37, 37, 37))),
        }
    )

    assert [(found[rank].waits, found[rank].has_begun) for rank in range(3)] == [
        (True, True),
        (True, False),
        (False, False),
    ]


def test_stalled_is_who_waits_for_the_end_of_one_and_enters_no_other() -> None:
    waits, over = {(0, 0): Count(8, -1, 7)}, {(0, 0): Count(8, -1, 8)}
    # Some backends do not count ends.
    unknown = {(0, 0): Count(8, -1, -1)}

    assert is_stalled(waits, waits)
    assert not any(is_stalled(*pair) for pair in ((waits, over), (over, over), (unknown, unknown), ({}, {})))
    assert not is_stalled(waits, {(0, 0): Count(9, -1, 8)})
