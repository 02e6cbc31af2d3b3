"""Nodes with a role each: a lost node's seat is for a node of its role, and a job waits for a role that nobody has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.cluster import LightCluster
from tests.nodes import needs_nodes

pytestmark = needs_nodes


def test_a_spare_of_another_role_leaves_a_lost_nodes_seat_to_a_node_of_its_role(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 4) as cluster:
        cluster.start(0, nnodes="2", options=("--role", "ps"))
        cluster.start(1, nnodes="2", options=("--role", "trainer"))
        first = cluster.meeting(2)
        cluster.start(2, nnodes="2", options=("--role", "ps"))
        cluster.agents[2].wait_for_output("waiting as a spare")
        cluster.nodes[1].power_off()

        cluster.wait_for_leaders_output("waiting for a node with the role trainer")
        cluster.start(3, nnodes="2", options=("--role", "trainer"))

        second = cluster.meeting(2, after=first)
        assert second.hosts == ["node0", "node3"]
        cluster.agents[3].wait_for_output(r"2 workers on 2 nodes \(1 ps, 1 trainer; node1 was lost")
        cluster.end(0, 2, 3)


@pytest.mark.slow
def test_an_elastic_job_waits_for_its_last_server_and_not_for_one_of_two_trainers(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 5) as cluster:
        cluster.start(0, nnodes="1:3", options=("--role", "ps"))
        cluster.start(1, 2, nnodes="1:3", options=("--role", "trainer"))
        meeting = cluster.meeting(3)

        cluster.nodes[1].power_off()
        meeting = cluster.meeting(2, after=meeting)
        assert sorted(meeting.hosts) == ["node0", "node2"]
        cluster.start(3, nnodes="1:3", options=("--role", "ps"))
        cluster.agents[3].wait_for_output("the free seats are for nodes with the role trainer; waiting as a spare")
        cluster.goes_on(meeting)

        # Its spare is of the same role.
        cluster.nodes[0].power_off()
        meeting = cluster.meeting(2, after=meeting)
        assert sorted(meeting.hosts) == ["node2", "node3"]

        cluster.nodes[3].power_off()
        cluster.agents[2].wait_for_output("waiting for a node with the role ps")
        cluster.start(4, nnodes="1:3", options=("--role", "ps"))
        meeting = cluster.meeting(2, after=meeting)
        assert sorted(meeting.hosts) == ["node2", "node4"]
        assert not re.search(r"generation \d+: 1 worker", cluster.agents[2].stderr)
        cluster.end(2, 4)
