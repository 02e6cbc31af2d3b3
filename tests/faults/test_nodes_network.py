"""Networks and whole nodes that fail under a job on several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, Cluster, Shared
from tests.faults.processes import is_alive
from tests.harness import slow
from tests.nodes import needs_nodes

pytestmark = needs_nodes


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
