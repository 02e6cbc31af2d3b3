"""An etcd that fails under a job on several nodes: a member, the leader, its host, all of it, its data."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, LightCluster, Shared
from tests.faults.processes import is_alive
from tests.harness import script, wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

THREE = (0, 1, 2)


@pytest.mark.slow
def test_a_node_lost_together_with_its_etcd_member_costs_what_a_node_costs(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3, members_on=THREE) as cluster:
        cluster.start(0, 1, 2, nnodes="2:3")
        first = cluster.meeting(3)
        # Lose the worst node: its member leads etcd.
        lost = next(node for node in cluster.nodes if cluster.member_on(node) is cluster.etcd.leader())

        lost.power_off()

        second = cluster.meeting(2, after=first)
        assert second.hosts == [host for host in first.hosts if host != lost.name]
        assert second.restarts == 0
        cluster.end(*({0, 1, 2} - {lost.index}))


@pytest.fixture(scope="module")
def on_three_members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A job of two nodes whose etcd has three members."""
    with Shared(tmp_path_factory, 2, nodes=3, members_on=THREE, nnodes="1:2") as shared:
        yield shared


class LogsFromNow:
    """The output of a job's agents from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._heard = {index: len(agent.stderr) for index, agent in cluster.agents.items()}

    def wait_for(self, words: str) -> None:
        """Wait until all agents have printed these words."""
        agents = self._cluster.agents
        wait_for(lambda: all(words in agents[i].stderr[since:] for i, since in self._heard.items()), f"{words!r}")


def test_a_killed_etcd_leader_costs_nothing(on_three_members: Shared) -> None:
    cluster, first = on_three_members.job()
    leader = cluster.etcd.leader()

    leader.kill()

    # Train for twice the lease time, so that a lease that is not renewed would have ended.
    cluster.trains_for(first, 7)
    assert cluster.etcd.leader() is not leader
    os.kill(first.pid(1), signal.SIGKILL)
    second = cluster.meeting(2, after=first)
    assert second.generation == first.generation + 1
    assert second.restarts == first.restarts + 1
    leader.revive()
    cluster.goes_on(second)


def test_training_goes_on_while_all_of_etcd_is_away_and_no_generation_opens_when_it_is_back(
    on_three_members: Shared,
) -> None:
    cluster, meeting = on_three_members.job()
    logged = LogsFromNow(cluster)

    for member in cluster.etcd.members:
        member.kill()

    # Train for twice the lease time, so that a lease that is not renewed would have ended.
    cluster.trains_for(meeting, 7)
    logged.wait_for("the store is unreachable")
    for member in cluster.etcd.members:
        member.start()
    logged.wait_for("the store is back")
    # A node that is wrongly taken for lost would be declared lost within this time.
    cluster.trains_for(meeting, 7)
    cluster.end()


# Workers that do not hear of each other's end.
SLEEPER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], "pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def test_an_etcd_that_has_lost_its_history_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    program = script(tmp_path, SLEEPER, "sleeper.py")
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", program=program)
        pids = wait_for(lambda: len(found := pids_in(tmp_path)) == 2 and found, "both workers")

        lose_history(cluster)

        cluster.ended({0: 3, 1: 3})
        assert not any(map(is_alive, pids))
        for agent in cluster.agents.values():
            assert "history" in agent.stderr, agent.stderr


def lose_history(cluster: Cluster) -> None:
    """The etcd's host loses its power, and its disk with it."""
    (member,) = cluster.etcd.members
    member.kill()
    cluster.nodes[2].power_off()
    cluster.nodes[2].power_on()
    member.start()


def pids_in(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("pid-*") if (text := path.read_text())]
