"""bench.stamps: stages from what agent and workers noted."""

from __future__ import annotations

import pytest

from bench.stamps import Stamp, again, all_at_s, at, last_s, parse, restart_stages


def stamps(*entries: tuple[int, str, float, int]) -> list[Stamp]:
    return [Stamp(*entry) for entry in entries]


def test_a_line_that_is_still_being_written_is_left_out() -> None:
    whole = '{"generation": 0, "event": "step", "monotonic_s": 2.5, "rank": 1, "pid": 7}\n'

    assert parse(whole + whole[:20]) == [Stamp(0, "step", 2.5, 1, 7)]
    assert parse("") == []


def test_all_are_there_when_the_last_rank_is() -> None:
    seen = stamps((0, "step", 1.0, 0), (0, "step", 3.0, 1), (1, "step", 9.0, 0))

    assert all_at_s(seen, 0, "step", 2) == 3.0
    assert all_at_s(seen, 1, "step", 2) is None
    assert sorted(at(seen, 0, "step")) == [0, 1]


def test_a_restart_is_detected_by_the_first_exit_after_the_kill() -> None:
    agent = stamps(
        (0, "exited", 10.1, 1),
        (0, "stopping", 10.2, -1),
        (0, "exited", 10.3, 0),
        (0, "stopped", 10.3, -1),
        (0, "cleared", 10.4, -1),
        (1, "sealed", 10.5, -1),
        (1, "forked", 10.6, 0),
        (1, "forked", 10.7, 1),
    )
    workers = stamps((0, "step", 5.0, 0), (1, "script", 10.8, 0), (1, "script", 10.9, 1), (1, "step", 11.0, 0))

    stages = restart_stages(agent, workers, 1, 2, 10.0)

    assert stages == pytest.approx(
        {
            "detected": 0.1,
            "others notified": 0.2,
            "all stopped": 0.3,
            "cleared": 0.4,
            "sealed": 0.5,
            "last fork": 0.7,
            "script's first line": 0.9,
        }
    )


def test_whoever_trains_again_is_the_newest_process_of_its_rank() -> None:
    def process(rank: int, pid: int, trained_s: float, generation: int) -> list[Stamp]:
        return [Stamp(generation, e, trained_s + s, rank, pid) for e, s in (("all_reduce", -1.0), ("training", 0.0))]

    # Each of torchrun's nodes counts its own restarts.
    before, after = process(0, 1, 5.0, 0) + process(1, 2, 5.0, 0), process(0, 3, 12.0, 1) + process(1, 4, 13.0, 0)

    assert again(before, 0.0, 2) == before
    assert again(before + after[:2], 10.0, 2) is None
    assert again(before + after, 10.0, 2) == after
    assert last_s(after, "all_reduce") == 12.0
