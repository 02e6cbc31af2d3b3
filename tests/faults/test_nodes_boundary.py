"""Nodes that come and go while workers listen: all ranks stop after the same step, and no step is lost or repeated."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.meetings import Meeting
from tests.harness import wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

LISTENER = Path(__file__).with_name("listener.py")
STEPS = 10


def trained(cluster: Cluster, meeting: Meeting) -> None:
    """That generation has done some steps."""
    number = meeting.generation
    wait_for(lambda: len(cluster.records.of("step", number)) >= STEPS * len(meeting.records), "some steps")


def assert_stopped_together(cluster: Cluster, meeting: Meeting, reason: str) -> int:
    """All ranks of that generation were asked and stopped after the same step, the last that any did; that step."""
    number, ranks = meeting.generation, sorted(meeting.records)
    stopped = cluster.records.of("stopped", number)
    assert sorted(r["rank"] for r in stopped) == ranks, cluster.story()
    (step,) = {r["step"] for r in stopped}
    assert step == max(r["step"] for r in cluster.records.of("step", number))
    asked = cluster.records.of("asked", number)
    assert {r["reason"] for r in asked} == {reason}, cluster.story()
    assert not cluster.records.of("signalled"), cluster.story()
    return int(step)


def assert_each_step_was_done_once(cluster: Cluster) -> None:
    steps = [r["step"] for r in cluster.records.of("step") if r["rank"] == 0]
    assert steps == list(range(1, len(steps) + 1))


def test_a_node_that_joins_has_all_ranks_of_two_agents_stop_after_the_same_step(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        options = ("--nproc-per-node", "2")
        cluster.start(0, 1, nnodes="2:3", program=LISTENER, options=options)
        first = cluster.meeting(4)
        trained(cluster, first)

        cluster.start(2, nnodes="2:3", program=LISTENER, options=options)

        second = cluster.meeting(6, after=first)
        assert second.generation == first.generation + 1
        assert second.restarts == 0
        trained(cluster, second)
        assert_stopped_together(cluster, first, "join")
        cluster.end()
        assert_each_step_was_done_once(cluster)
        assert not [a.stderr for a in cluster.agents.values() if "came to no step boundary" in a.stderr]


def test_a_node_that_is_preempted_has_all_ranks_stop_and_the_others_go_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, 2, nnodes="2:3", program=LISTENER)
        first = cluster.meeting(3)
        trained(cluster, first)
        gone = cluster.node(first.hosts[1])

        cluster.agents[gone.index].signal(signal.SIGTERM)

        assert cluster.agents[gone.index].wait() == 143
        second = cluster.meeting(2, after=first)
        assert second.generation == first.generation + 1
        assert second.restarts == 0
        trained(cluster, second)
        assert_stopped_together(cluster, first, "leave")
        cluster.assert_nothing_is_left(gone)
        cluster.end(*({0, 1, 2} - {gone.index}))
        assert_each_step_was_done_once(cluster)


def test_ctrl_c_on_one_node_has_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", program=LISTENER)
        first = cluster.meeting(2)
        trained(cluster, first)

        cluster.agents[1].signal(signal.SIGINT)

        cluster.ended({0: 130, 1: 130})
        assert_stopped_together(cluster, first, "interrupt")
