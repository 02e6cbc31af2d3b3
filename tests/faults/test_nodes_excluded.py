"""A node that fails the same way again and again, and a node that is not healthy, on nodes with a real etcd."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.faults.cluster import PATIENT, LightCluster
from tests.nodes import needs_nodes

pytestmark = needs_nodes


def test_a_node_that_fails_three_times_is_kept_out_and_the_spare_takes_its_place(tmp_path: Path) -> None:
    options = ("--max-restarts", "6", *PATIENT)
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, nnodes="2", options=options)
        meeting = cluster.meeting(2)
        cluster.start(2, nnodes="2", options=options)
        cluster.agents[2].wait_for_output("waiting as a spare")
        well, sick = meeting.hosts
        for _ in range(3):
            assert meeting.hosts == [well, sick]
            os.kill(meeting.pid(1), signal.SIGKILL)
            meeting = cluster.meeting(2, after=meeting)

        assert meeting.hosts == [well, "node2"]
        agent = cluster.agents[cluster.node(sick).index]
        agent.wait_for_output(
            rf"generation {meeting.generation} runs without this node: it is excluded \(--exclude-after\),"
            rf" since the last 3 failures were all on {sick}, and alike \(signal\)"
        )
        cluster.agents[2].wait_for_output(f"{sick} is excluded: the last 3 failures were all on {sick}")
        # It stays out also after a failure of another node, and ends well with the job.
        os.kill(meeting.pid(0), signal.SIGKILL)
        again = cluster.meeting(2, after=meeting)
        assert again.hosts == [well, "node2"]
        cluster.end()


def test_an_unhealthy_node_does_not_join_and_another_takes_its_place(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.nodes[1].run("mount", "-o", "remount,size=20M", "/dev/shm")
        cluster.start(0, nnodes="2", options=PATIENT)
        cluster.start(1, nnodes="2", options=("--health-check", "strict", *PATIENT))

        assert cluster.agents[1].wait() == 3
        cluster.start(2, nnodes="2", options=("--health-check", "strict", *PATIENT))

        assert cluster.meeting(2).hosts == ["node0", "node2"]
        assert "this node does not join the job, since it is not healthy: 20 MiB of 20 MiB" in cluster.agents[1].stderr
        cluster.end(0, 2)
