"""Nodes that come and go while workers listen: all ranks stop after the same step, and no step is lost or repeated."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, Cluster, LightCluster
from tests.faults.meetings import Meeting
from tests.harness import wait_for
from tests.nodes import Node, needs_nodes

pytestmark = needs_nodes

LISTENER = Path(__file__).with_name("listener.py")
STEPS = 10


def trained(cluster: Cluster, meeting: Meeting) -> None:
    """Wait until that generation has done some steps."""
    number = meeting.generation
    wait_for(lambda: len(cluster.records.of("step", number)) >= STEPS * len(meeting.records), "some steps")


def assert_stopped_together(cluster: Cluster, meeting: Meeting, reason: str) -> int:
    """Check that all ranks of that generation were asked and stopped after the same step, the last one. Returns it."""
    number, ranks = meeting.generation, sorted(meeting.records)
    stopped = cluster.records.of("stopped", number)
    assert sorted(r["rank"] for r in stopped) == ranks, cluster.story()
    (step,) = {r["step"] for r in stopped}
    assert step == max(r["step"] for r in cluster.records.of("step", number))
    assert step % 3 == 0
    asked = cluster.records.of("asked", number)
    assert {r["reason"] for r in asked} == {reason}, cluster.story()
    assert not cluster.records.of("signalled"), cluster.story()
    return int(step)


@dataclass(frozen=True)
class Job:
    """One job of three generations: in the first a node joins, in the second a node is preempted, and in the third a
    node gets a Ctrl-C, which ends the job."""

    cluster: Cluster
    two_nodes: Meeting
    three_nodes: Meeting
    two_again: Meeting
    preempted: Node
    preempted_code: int


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with LightCluster(tmp_path_factory.mktemp("job"), 3) as cluster:
        start = partial(cluster.start, nnodes="2:3", program=LISTENER, options=("--nproc-per-node", "2", *PATIENT))
        start(0, 1)
        two_nodes = cluster.meeting(4)
        trained(cluster, two_nodes)

        start(2)
        three_nodes = cluster.meeting(6, after=two_nodes)
        trained(cluster, three_nodes)

        # Preempt neither the first nor the last node.
        preempted = cluster.node(three_nodes.hosts[2])
        cluster.agents[preempted.index].signal(signal.SIGTERM)
        code = cluster.agents[preempted.index].wait()
        two_again = cluster.meeting(4, after=three_nodes)
        cluster.assert_nothing_is_left(preempted)
        trained(cluster, two_again)

        cluster.agents[cluster.node(two_again.hosts[-1]).index].signal(signal.SIGINT)
        cluster.ended(dict.fromkeys({0, 1, 2} - {preempted.index}, 130))
        yield Job(cluster, two_nodes, three_nodes, two_again, preempted, code)


def test_a_node_that_joins_has_all_ranks_of_two_agents_stop_after_the_same_step(job: Job) -> None:
    assert_stopped_together(job.cluster, job.two_nodes, "join")

    assert job.three_nodes.generation == job.two_nodes.generation + 1
    assert job.three_nodes.restarts == 0


def test_a_node_that_is_preempted_has_all_ranks_stop_and_the_others_go_on(job: Job) -> None:
    assert_stopped_together(job.cluster, job.three_nodes, "leave")

    assert job.preempted_code == 143
    assert job.two_again.generation == job.three_nodes.generation + 1
    assert job.two_again.restarts == 0
    assert job.preempted.name not in job.two_again.hosts


def test_ctrl_c_on_one_node_has_all_ranks_stop_after_the_same_step(job: Job) -> None:
    assert_stopped_together(job.cluster, job.two_again, "interrupt")


def test_nodes_that_come_and_go_cost_no_step_and_repeat_none(job: Job) -> None:
    steps = [r["step"] for r in job.cluster.records.of("step") if r["rank"] == 0]

    assert steps == list(range(1, len(steps) + 1))
    assert not [a.stderr for a in job.cluster.agents.values() if "reached no step boundary" in a.stderr]
