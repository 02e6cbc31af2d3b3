"""agent.metrics.counters: where a node's time went, as the timeline tells it."""

from __future__ import annotations

import pytest

from elaunch.agent.metrics.counters import Counts, RunCounters, TimeUse

FAILED = {"kind": "signal", "failed_at": 1700000000.5}


def counted(*events: tuple[float, str, dict[str, object]]) -> RunCounters:
    counters = RunCounters(100.0)
    for at_s, event, fields in events:
        counters.count(event, fields, 100.0 + at_s)
    return counters


def seconds(counts: Counts) -> dict[str, float]:
    return {use.value: spent for use, spent in counts.seconds.items() if spent}


def test_a_program_that_reports_no_steps_is_productive_from_its_start() -> None:
    counters = counted((2, "sealed", {}), (3, "forked", {"rank": 0}), (3.5, "forked", {"rank": 1}))

    assert seconds(counters.at(113.0)) == {"waiting": 2.0, "starting": 1.0, "productive": 10.0}


def test_a_restart_costs_the_stop_the_wait_and_the_start_up_to_the_first_step() -> None:
    counters = counted(
        (1, "sealed", {}),
        (2, "forked", {}),
        (4, "progress", {"steps": [0, 0], "first_steps": [0, 0]}),
        (14, "progress", {"steps": [9, 8]}),
        (20, "failed", FAILED),
        (21, "stopping", {}),
        (22, "stopped", {}),
        (22, "progress", {"steps": [12, 11]}),
        (23, "cleared", {}),
        (23, "cause", FAILED),
        (25, "sealed", {}),
        (26, "forked", {}),
        (31, "progress", {"steps": [10, 10], "first_steps": [10, 10]}),
    )

    counts = counters.at(140.0)

    assert seconds(counts) == {"waiting": 3.0, "starting": 7.0, "productive": 27.0, "stopping": 3.0}
    assert sum(counts.seconds.values()) == pytest.approx(40.0)
    # Steps 10, 11 and 12 had been complete.
    assert counts.steps_repeated == 3
    assert (counts.failures, counts.last_failure) == ({"signal": 1}, (1700000000.5, "signal"))


def test_a_job_that_loses_no_step_repeats_none() -> None:
    counters = counted(
        (1, "progress", {"steps": [12, 12], "first_steps": [0, 0]}),
        (2, "progress", {"steps": [13, 13], "first_steps": [13, -1]}),
    )

    assert counters.at(110.0).steps_repeated == 0


def test_no_counter_ever_falls_between_two_scrapes() -> None:
    events = ["sealed", "forked", "progress", "failed", "stopped", "cleared", "sealed", "forked", "progress"]
    counters = RunCounters(0.0)
    before = counters.at(0.0)

    for number, event in enumerate(events):
        counters.count(event, {"steps": [number], **FAILED}, float(number))
        now = counters.at(number + 0.5)
        assert all(now.seconds[use] >= before.seconds[use] for use in TimeUse)
        before = now


def test_a_hang_counts_once_however_it_was_found() -> None:
    assert counted((1, "hung", {"quiet_s": 60})).at(110.0).hangs == 1
    assert counted((1, "seems_hung", {"message": "it waits"}), (2, "hung", {})).at(110.0).hangs == 1
