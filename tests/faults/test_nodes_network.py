"""Networks and whole nodes that fail under a job on several nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, PORT, Cluster, LightCluster, Shared
from tests.faults.processes import is_alive
from tests.harness import COMMAND, DEADLINE_S, slow, wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

TOKEN = {"ELAUNCH_TOKEN": "the token of this test"}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A job of three nodes; the etcd is on a fourth one."""
    with Shared(tmp_path_factory, 3, nnodes="2:3") as shared:
        yield shared


@pytest.mark.parametrize(("off", "on"), [("link_down", "link_up"), slow("unplug", "plug_in")])
def test_a_node_whose_link_was_off_stops_its_old_workers_and_joins_as_new(trio: Shared, off: str, on: str) -> None:
    cluster, first = trio.job()
    victim = cluster.node(first.hosts[1])
    old_worker = first.pid(1)

    getattr(victim, off)()

    second = cluster.meeting(2, after=first)
    assert second.hosts == [first.hosts[0], first.hosts[2]]
    assert second.restarts == 0
    assert is_alive(old_worker), "nobody tells a cut-off node to stop"
    getattr(victim, on)()
    third = cluster.meeting(3, after=second)
    assert third.hosts == [*second.hosts, victim.name], "survivors keep their order, newcomers are last"
    assert third.restarts == 0
    assert not is_alive(old_worker)
    cluster.records.assert_ended_before(third, rank=2, generation=first.generation)
    cluster.goes_on(third)


def test_a_node_that_is_cut_off_from_the_store_alone_is_replaced_by_a_generation_without_it(trio: Shared) -> None:
    cluster, first = trio.job()
    victim = cluster.node(first.hosts[1])

    cluster.nodes.cut(victim, cluster.nodes[3])

    second = cluster.meeting(2, after=first)
    assert victim.name not in second.hosts
    assert second.restarts == 0
    cluster.nodes.heal()
    third = cluster.meeting(3, after=second)
    assert third.hosts == [*second.hosts, victim.name]
    cluster.records.assert_ended_before(third, rank=2, generation=first.generation)
    cluster.goes_on(third)


def test_the_job_goes_on_without_the_node_of_rank_0_from_another_address_and_ends_well(trio: Shared) -> None:
    cluster, first = trio.job()
    lost = cluster.node(first.hosts[0])

    lost.power_off()

    second = cluster.meeting(2, after=first)
    assert second.hosts == first.hosts[1:]
    assert second.master_addr != first.master_addr
    assert second.restarts == 0
    cluster.end(*({0, 1, 2} - {lost.index}))


@pytest.mark.slow
def test_a_node_that_was_started_again_takes_part_again(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2")
        first = cluster.meeting(2)
        node = cluster.node(first.hosts[0])

        node.power_off()
        assert cluster.agents[node.index].process.wait(DEADLINE_S) != 0
        node.power_on()
        cluster.start(node.index, nnodes="2")

        second = cluster.meeting(2, after=first)
        assert second.hosts == [first.hosts[1], node.name]
        assert second.restarts == 0
        cluster.end()


@pytest.mark.slow
def test_a_lost_packet_in_ten_is_no_lost_node(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2")
        meeting = cluster.meeting(2)

        cluster.nodes.lose(10)

        # Train for six lease times. Now and then a renewal is lost.
        cluster.trains_for(meeting, 20)
        wait_for(lambda: cluster.nodes.lost() > 100, "a hundred lost packets")
        os.kill(meeting.pid(1), signal.SIGKILL)
        again = cluster.meeting(2, after=meeting)
        assert again.generation == meeting.generation + 1
        cluster.end()


@pytest.mark.slow
def test_two_nodes_that_lose_packets_only_between_them_and_the_store_are_not_given_up(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2")
        meeting = cluster.meeting(2)

        cluster.nodes.lose(30, cluster.nodes[2])

        cluster.trains_for(meeting, 10)
        assert cluster.nodes.lost() > 20
        cluster.end()


@pytest.mark.slow
def test_nodes_meet_over_ipv6(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, family="ipv6") as cluster:
        cluster.start(0, 1, nnodes="2")

        meeting = cluster.meeting(2)

        assert meeting.master_addr == cluster.node(meeting.hosts[0]).ipv6
        cluster.end()


def test_a_connection_that_breaks_between_healthy_ranks_is_a_lost_peer_and_no_ranks_own_failure(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2) as cluster:
        one, other = cluster.nodes[0], cluster.nodes[1]
        for node in (one, other):
            # The kernel gives a connection up after seconds, not after a quarter of an hour.
            node.run("sh", "-c", "echo 3 >/proc/sys/net/ipv4/tcp_retries2")
        cluster.start(0, 1, nnodes="2", options=PATIENT)
        first = cluster.meeting(2)

        # Both still reach the store.
        cluster.nodes.cut(one, other)
        cluster.wait_for_leaders_output("Connection timed out) in generation 0")
        cluster.nodes.heal()
        cluster.meeting(2, after=first)

        assert "lost a peer in all_reduce (RuntimeError: Read error [" in cluster.story()
        assert "raised RuntimeError" not in cluster.story()
        cluster.end()


# Each way in which a firewall closes ports: rules for the node of rank 0.
CLOSED = {"no answer": "drop", "refused": "reject", "no route to host": "reject with icmp type host-prohibited"}


@pytest.mark.parametrize("why", ["no answer", slow("refused"), slow("no route to host")])
def test_the_doctor_names_closed_ports_between_nodes(tmp_path: Path, why: str) -> None:
    with Cluster(tmp_path, 2, head=True) as cluster:
        head, other = cluster.nodes[0], cluster.nodes[1]
        cluster.endpoints = f"{head.ipv4}:{PORT}"
        chain = "chain closed { type filter hook input priority 0; iifname eth0 tcp dport != 2379 tcp flags syn"
        head.run("nft", f"table ip firewall {{ {chain} {CLOSED[why]}; }}; }}")
        cluster.start(0, 1, nnodes="2", options=PATIENT, env=TOKEN)

        cluster.agents[1].wait_for_output("^elaunch: generation 0")
        command = (*COMMAND, "doctor", "--nnodes", "2", "--rdzv-endpoint", cluster.endpoints, "--no-python", "true")
        seen = other.run("env", f"ELAUNCH_TOKEN={TOKEN['ELAUNCH_TOKEN']}", *command)

        assert ("10.77.0.1 does not answer at ports" in seen) == (why != "refused"), seen
