"""Workers and agents that fail on one of several nodes, each with an agent on one real etcd."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, Cluster, LightCluster, Shared
from tests.faults.processes import is_alive
from tests.harness import slow
from tests.nodes import needs_nodes

pytestmark = needs_nodes


# With torch itself test_keeper_nodes.py kills a worker on one node, on such hosts too.
@pytest.mark.parametrize("kind", [LightCluster, slow(Cluster)])
def test_a_worker_killed_on_one_node_restarts_the_workers_of_all(tmp_path: Path, kind: type[Cluster]) -> None:
    """On hosts whose own names mean loopback to themselves, as Debian installs them."""
    with kind(tmp_path, 2, own_name_is_loopback=True) as cluster:
        cluster.start(0, 1, nnodes="2", options=("--nproc-per-node", "2", *PATIENT))
        first = cluster.meeting(4)
        assert first.master_addr == cluster.node(first.hosts[0]).ipv4
        victim = first.ranks_on(cluster.nodes[0])[1]

        os.kill(first.pid(victim), signal.SIGKILL)

        second = cluster.meeting(4, after=first)
        assert second.generation == first.generation + 1
        assert second.restarts == 1
        assert second.hosts == first.hosts
        assert not any(is_alive(first.pid(rank)) for rank in range(4))
        logged = (
            rf"rank {victim} \(local rank 1 on node0, pid {first.pid(victim)}\) was killed by SIGKILL in generation 0"
        )
        # The other node says the cause, too.
        for agent in cluster.agents.values():
            agent.wait_for_output(logged)
        cluster.end()


# A lost node is waited for in one test alone. In the others no node is to be lost on a busy machine.
PAIR = ("--max-restarts", "100", "--master-port", "29511", "--rdzv-conf", "lease_ttl=10")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A job of two nodes, beside a third one."""
    with Shared(tmp_path_factory, 2, nodes=3, nnodes="2", options=PAIR) as shared:
        yield shared


def test_a_node_with_another_command_is_refused_and_the_job_is_untouched(pair: Shared) -> None:
    cluster, meeting = pair.job()
    other = cluster.folder / "other.py"
    other.write_text("print('hello')")

    cluster.start(2, nnodes="2", options=PAIR, program=other)

    assert cluster.agents[2].wait() == 2
    cluster.assert_nothing_is_left(cluster.nodes[2])
    logged = cluster.agents.pop(2).stderr
    assert "reducer.py" in logged
    assert "other.py" in logged
    cluster.goes_on(meeting)


def test_a_job_that_has_recovered_ends_well_on_all_nodes_and_leaves_nothing(pair: Shared) -> None:
    cluster, _ = pair.job()

    cluster.end()


def test_a_failure_with_no_restart_left_ends_all_agents_with_the_same_first_failure(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", options=("--max-restarts", "1", *PATIENT))
        first = cluster.meeting(2)
        os.kill(first.pid(0), signal.SIGKILL)
        second = cluster.meeting(2, after=first)

        # Rank 1 raises an exception. An exit code alone may also follow from a peer's end, if that is seen first.
        cluster.ask("raise", generation=second.generation, rank=1)

        cluster.ended({0: 1, 1: 1})
        words = rf"rank 1 \(local rank 0 on {second.hosts[1]}, pid {second.pid(1)}\) raised RuntimeError: asked for by"
        for agent in cluster.agents.values():
            assert re.search(rf"^{words}.* in generation 1\.$", agent.stderr, re.MULTILINE), agent.stderr
            assert "1 of 1 restarts used" in agent.stderr


@pytest.mark.slow
@pytest.mark.parametrize("leads", [True, False])
def test_a_killed_agents_node_is_given_up_and_the_others_go_on(tmp_path: Path, leads: bool) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, 2, nnodes="2:3")
        first = cluster.meeting(3)
        index = cluster.leader() if leads else (cluster.leader() + 1) % 3

        cluster.agents[index].kill_agent()

        second = cluster.meeting(2, after=first)
        assert second.hosts == [host for host in first.hosts if host != f"node{index}"]
        assert second.restarts == 0
        assert cluster.leader() != index
        cluster.end(*({0, 1, 2} - {index}))


def test_sigterm_to_one_agent_is_published_and_the_others_resume_immediately(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        # No lease ends in this test, so the other nodes learn of an end only if the agent says it.
        cluster.start(0, 1, 2, nnodes="2:3", options=("--rdzv-conf", "lease_ttl=600"))
        first = cluster.meeting(3)

        cluster.agents[0].signal(signal.SIGTERM)

        second = cluster.meeting(2, after=first)
        assert second.hosts == [host for host in first.hosts if host != "node0"]
        assert second.restarts == 0
        assert cluster.agents[0].wait() == 128 + signal.SIGTERM
        cluster.assert_nothing_is_left(cluster.nodes[0])
        cluster.end(1, 2)
