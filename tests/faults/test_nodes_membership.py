"""Nodes that come and go: late ones, spares, and a job that is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.rendezvous.rules.snapshot import Keys
from tests.faults.cluster import LightCluster
from tests.nodes import needs_nodes

pytestmark = needs_nodes


@pytest.mark.slow
def test_a_node_that_comes_late_gets_a_seat_in_a_new_generation(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, nnodes="1:2")
        alone = cluster.meeting(1)

        cluster.start(1, nnodes="1:2")

        both = cluster.meeting(2, after=alone)
        assert both.hosts == ["node0", "node1"]
        assert both.restarts == 0
        cluster.end()


def test_a_node_with_any_hostname_joins_and_no_broken_record_costs_the_job(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        name = "my host\x1b]0;x\x07\n"
        sethostname = f"import socket; socket.sethostname({name!r})"
        subprocess.run([*cluster.nodes[2].prefix, sys.executable, "-c", sethostname], check=True, timeout=30)
        cluster.start(0, 1, nnodes="2:3")
        first = cluster.meeting(2)
        keys = Keys("job")
        scribbled = [keys.joined(first.generation, "x-1"), keys.table(first.generation), keys.leader, keys.generation]
        for key in scribbled:
            cluster.etcd.ctl("put", key, "{")

        cluster.start(2, nnodes="2:3")

        three = cluster.meeting(3, after=first)
        assert sorted(three.hosts) == [name, "node0", "node1"]
        cluster.end()
        said = "".join(agent.output for agent in cluster.agents.values())
        assert [key for key in scribbled if f"{key} in the store is" not in said] == []
        assert "this job calls it my-host-]0;x--" in said
        own = [line for line in said.splitlines() if line.startswith("elaunch: ")]
        assert [line for line in own if not line.isprintable()] == []


def test_a_spare_takes_the_seat_of_a_lost_node(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, nnodes="2")
        first = cluster.meeting(2)
        cluster.start(2, nnodes="2")
        cluster.agents[2].wait_for_output("waiting as a spare")
        cluster.goes_on(first)
        lost = cluster.node(first.hosts[1])

        lost.power_off()

        second = cluster.meeting(2, after=first)
        assert second.generation == first.generation + 1
        assert second.hosts == [first.hosts[0], "node2"]
        assert second.restarts == 0
        cluster.end(*({0, 1, 2} - {lost.index}))


@pytest.mark.slow
def test_a_spare_that_was_not_needed_ends_well_with_the_job(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, nnodes="2")
        meeting = cluster.meeting(2)
        cluster.start(2, nnodes="2")
        cluster.agents[2].wait_for_output("waiting as a spare")

        cluster.end()

        assert {r["host"] for r in cluster.records.of("started")} == set(meeting.hosts)
