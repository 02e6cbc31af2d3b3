"""Networks and whole nodes that fail under a job on several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, PORT, Cluster, Shared
from tests.faults.processes import is_alive
from tests.harness import COMMAND, slow
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
    assert is_alive(old_worker), "no process can stop a cut-off node"
    getattr(victim, on)()
    third = cluster.meeting(3, after=second)
    assert third.hosts == [*second.hosts, victim.name], "survivors keep their order, newcomers are last"
    assert third.restarts == 0
    assert not is_alive(old_worker)
    cluster.records.assert_ended_before(third, rank=2, generation=first.generation)
    cluster.goes_on(third)


@pytest.mark.slow
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


# Each way in which a firewall closes ports: rules for the node of rank 0, what the other node says, and its doctor.
CLOSED = {"no answer": "drop", "refused": "reject", "no route to host": "reject with icmp type host-prohibited"}


@pytest.mark.parametrize("why", ["no answer", slow("refused"), slow("no route to host")])
def test_a_closed_port_between_nodes_is_named_by_the_node_that_cannot_connect(tmp_path: Path, why: str) -> None:
    with Cluster(tmp_path, 2, head=True) as cluster:
        head, other = cluster.nodes[0], cluster.nodes[1]
        cluster.endpoints = f"{head.ipv4}:{PORT}"
        chain = "chain closed { type filter hook input priority 0; iifname eth0 tcp dport != 2379 tcp flags syn"
        head.run("nft", f"table ip firewall {{ {chain} {CLOSED[why]}; }}; }}")
        cluster.start(0, 1, nnodes="2", options=PATIENT, env=TOKEN)

        logged = (
            rf"^elaunch: this node cannot connect to 10\.77\.0\.1:\d+ \({why}\), MASTER_PORT on the node of rank 0: "
        )
        cluster.agents[1].wait_for_output(logged + r"a firewall\? Ports to open")
        command = (*COMMAND, "doctor", "--nnodes", "2", "--rdzv-endpoint", cluster.endpoints, "--no-python", "true")
        seen = other.run("env", f"ELAUNCH_TOKEN={TOKEN['ELAUNCH_TOKEN']}", *command)

        assert ("10.77.0.1 does not answer on ports" in seen) == (why != "refused"), seen
