"""Nodes that come and go: late ones, spares, and a job that is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.rendezvous.rules.snapshot import Keys
from tests.faults.cluster import PATIENT, Cluster, LightCluster
from tests.harness import wait_for
from tests.nodes import needs_nodes
from tests.standin import WITHOUT_TORCH

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


@pytest.mark.slow
def test_a_node_that_comes_when_one_is_done_gets_no_seat(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, nnodes="2:3")
        first = cluster.meeting(2)
        cluster.ask("hang", moment="last", generation=first.generation, rank=1)
        (tmp_path / "end").touch()
        wait_for(lambda: cluster.records.of("ended"), "rank 0 has ended")
        done = cluster.node(first.hosts[0]).index
        wait_for(lambda: not cluster.workers_on(cluster.nodes[done]), "rank 0 is gone")

        cluster.start(2, nnodes="2:3")

        cluster.agents[2].wait_for_output("waiting")
        os.kill(first.pid(1), signal.SIGUSR1)
        cluster.ended({0: 0, 1: 0, 2: 0})
        assert {r["generation"] for r in cluster.records.of("started")} == {first.generation}


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


@pytest.mark.slow
def test_a_job_below_its_smallest_size_ends_after_the_join_timeout(tmp_path: Path) -> None:
    options = ("--stop-grace", "1", "--rdzv-conf", "join_timeout=30")
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", options=options)
        first = cluster.meeting(2)

        cluster.nodes[1].power_off()

        cluster.ended({0: 1})
        assert "1 of 2" in cluster.agents[0].stderr
        assert {r["generation"] for r in cluster.records.of("started")} == {first.generation}


def test_a_newcomer_that_lacks_a_library_leaves_and_the_job_goes_on(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        program = tmp_path / "train.py"
        reducer = Path(__file__).with_name("reducer.py")
        program.write_text(f"import of_node0, runpy\nrunpy.run_path({str(reducer)!r}, run_name='__main__')\n")
        (tmp_path / "node0").mkdir()
        (tmp_path / "node0" / "of_node0.py").touch()
        path = {"PYTHONPATH": os.pathsep.join((".", *WITHOUT_TORCH.values()))}
        cluster.start(0, nnodes="1:2", program=program, options=PATIENT, env=path)
        first = cluster.meeting(1)

        cluster.start(1, nnodes="1:2", program=program, options=PATIENT, env=path)

        assert cluster.agents[1].wait() == 1
        assert "No module named 'of_node0'" in cluster.agents[1].stderr
        second = cluster.meeting(1, after=first)
        assert second.restarts == 0
        cluster.goes_on(second)
        cluster.end(0)


@pytest.mark.slow
def test_a_job_of_which_nothing_fails_stays_in_its_first_generation(tmp_path: Path) -> None:
    # The shortest time to live for keys, so that the run's own lease is renewed several times, like the nodes' leases.
    _is_left_alone(LightCluster(tmp_path, 3, members_on=(0, 1, 2)), 14, 1, "--rdzv-conf", "keys_ttl=12")


@pytest.mark.slow
def test_a_job_of_which_nothing_fails_for_an_hour_stays_in_its_first_generation(tmp_path: Path) -> None:
    _is_left_alone(Cluster(tmp_path, 3, members_on=(0, 1, 2)), 3600, 2)


def _is_left_alone(made: Cluster, duration_s: float, workers: int, *options: str) -> None:
    with made as cluster:
        # Slow steps leave the cores to the tests that run at the same time.
        options = ("--nproc-per-node", str(workers), *options)
        cluster.start(0, 1, 2, nnodes="2:3", options=options, env={"STEP_S": "0.1"})
        meeting = cluster.meeting(3 * workers)

        cluster.trains_for(meeting, duration_s)

        cluster.end()
        assert {r["generation"] for r in cluster.records.of("started")} == {meeting.generation}
        for agent in cluster.agents.values():
            assert "the store is away" not in agent.stderr
