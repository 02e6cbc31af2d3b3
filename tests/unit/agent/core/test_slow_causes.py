"""agent.core.slow_causes: what may make a slow rank slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.slow_causes import Cause, Traits, differences, slow_words
from elaunch.agent.core.slow_ranks import Slow
from elaunch.rendezvous.rules.pace import SlowNode

USUAL = Traits(cpus=8, nice=0, delayed=0.02, throttled=0.0, children=0.6, major_faults=0.0, clock_mhz=1980)
SLOW = Slow(3, wait_share=0.3, lasted_s=120.0)
AMONG_NODES = Slow(3, 0.5, 540.0, among_nodes=SlowNode(0, "node-b-00000001", 11, is_whole=False, waits=0.1, others=0.5))
ON_NODE_B = (
    "rank 11 on node-b is slower than the ranks of the other nodes: those wait in collectives for 50% of the time or"
    " more, and it for 10%; "
)


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


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"cpus": 1}, ""),
        ({"nice": 10}, "its nice value is 10"),
        ({"delayed": 0.4}, "when it wants a CPU it has to wait for 40% of that time: other processes use its CPUs"),
        ({"throttled": 0.3}, "its cgroup's limit (cpu.max) holds it back for 30% of the time"),
        ({"children": 1.8}, ""),
        ({"clock_mhz": 1200}, ""),
        (
            {"clock_mhz": 1200, "limited_by": "its temperature"},
            "its GPU runs at 1200 MHz, limited by its temperature",
        ),
    ],
)
def test_a_rank_alone_on_its_node_has_the_causes_that_need_no_comparison(own: dict[str, float], words: str) -> None:
    found = differences(replace(USUAL, **own), [])  # type: ignore[arg-type]

    nothing = "nothing is seen on its host that holds it back, so it may have more work"
    assert slow_words(11, AMONG_NODES, found, is_compared=False).startswith(ON_NODE_B + (words or nothing))


def test_a_rank_that_is_slow_among_nodes_is_compared_with_those_of_its_own_node() -> None:
    found = differences(replace(USUAL, cpus=1), [USUAL])

    words = "compared with the other ranks of its node, it may use 1 CPU, and they 8 CPUs"
    assert slow_words(11, AMONG_NODES, found) == ON_NODE_B + words


def test_a_node_that_is_slow_as_a_whole_has_its_host_as_a_cause() -> None:
    found = differences(replace(USUAL, throttled=0.3), [], is_whole_node=True)

    assert [each.cause for each in found] == [Cause.CPU_LIMIT, Cause.HOST]
    whole = replace(AMONG_NODES, among_nodes=SlowNode(0, "node-b-00000001", 11, True, 0.1, 0.5))
    said = slow_words(11, whole, found, is_compared=False)
    assert said.startswith(
        "all ranks of node-b are slower than the ranks of the other nodes: those wait in collectives"
    )
    assert (
        "; as for rank 11, its cgroup's limit (cpu.max) holds it back for 30% of the time, and all ranks of its" in said
    )
