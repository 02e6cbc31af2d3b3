"""Nodes that come and go: late ones, spares, roles, nodes that are not healthy, and a job that is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from elaunch.rendezvous.rules.snapshot import Keys
from tests.faults.cluster import PATIENT, LightCluster
from tests.nodes import needs_nodes

pytestmark = needs_nodes


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
        logged = "".join(agent.output for agent in cluster.agents.values())
        assert [key for key in scribbled if f"{key} in the store is" not in logged] == []
        assert "this job uses my-host-]0;x-- instead" in logged
        own = [line for line in logged.splitlines() if line.startswith("elaunch: ")]
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
        assert "node1 does not join the job, since it is not healthy: 20 MiB of 20 MiB" in cluster.agents[1].stderr
        cluster.end(0, 2)
