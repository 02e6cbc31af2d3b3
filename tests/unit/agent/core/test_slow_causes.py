"""agent.core.slow_causes: what may make a slow rank slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.slow_causes import Cause, Traits, differences, slow_words
from elaunch.agent.core.slow_ranks import Slow

USUAL = Traits(cpus=8, nice=0, delayed=0.02, throttled=0.0, children=0.6, major_faults=0.0, clock_mhz=1980)
SLOW = Slow(3, wait_share=0.3, lasted_s=120.0)


@pytest.mark.parametrize(
    ("own", "cause", "words"),
    [
        ({"cpus": 1}, Cause.CPUS, "it may use 1 CPU, and they 8 CPUs"),
        ({"nice": 10}, Cause.NICE, "its nice value is 10, and theirs 0"),
        (
            {"delayed": 0.4},
            Cause.CONTENTION,
            "when it wants a CPU it has to wait for 40% of that time, and they for 2%: other processes use its CPUs",
        ),
        ({"throttled": 0.3}, Cause.CPU_LIMIT, "its cgroup's limit (cpu.max) holds it back for 30% of the time"),
        ({"major_faults": 120.0}, Cause.DISK, "it reads 120 pages a second from a disk (swap, or mapped files)"),
        ({"children": 1.8}, Cause.DATA_LOADING, "its data loaders use 1.8 CPUs, and theirs 0.6"),
        (
            {"clock_mhz": 1200, "limited_by": "its temperature"},
            Cause.GPU_CLOCK,
            "its GPU runs at 1200 MHz, and theirs at 1980 MHz, limited by its temperature",
        ),
    ],
)
def test_what_is_different_about_a_slow_rank_is_said(own: dict[str, float], cause: Cause, words: str) -> None:
    found = differences(replace(USUAL, **own), [USUAL, USUAL])  # type: ignore[arg-type]

    assert [(each.cause, each.words) for each in found] == [(cause, words)]
    assert slow_words(11, SLOW, found) == (
        "rank 11 is slower than the other ranks of this node: they wait for 30% of the time, for the last 120 s;"
        f" {words}"
    )


def test_several_differences_are_one_sentence_and_none_has_words_too() -> None:
    two = differences(replace(USUAL, nice=5, throttled=0.2), [USUAL])

    assert slow_words(11, SLOW, two).endswith(
        "theirs 0, and its cgroup's limit (cpu.max) holds it back for 20% of the time"
    )
    assert "are like theirs, so it may have more work" in slow_words(11, SLOW, differences(USUAL, [USUAL]))


def test_without_the_facts_only_what_was_seen_is_said() -> None:
    assert slow_words(11, SLOW, None).endswith("for the last 120 s")
