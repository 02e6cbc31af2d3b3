"""A job on several nodes without an etcd: the first node serves the store, and may fail."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.faults.cluster import LightCluster
from tests.faults.processes import is_alive
from tests.harness import script
from tests.nodes import needs_nodes

pytestmark = needs_nodes

TOKEN = {"ELAUNCH_TOKEN": "the token of this test"}
# The shortest store_timeout that the lease time allows.
SHORT = ("--rdzv-conf", "store_timeout=7")


def test_the_others_end_when_the_heads_agent_is_killed_and_name_it(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2, head=True) as cluster:
        cluster.start(0, 1, nnodes="2", options=SHORT, env=TOKEN)
        cluster.meeting(2)

        cluster.agents[0].kill_agent()

        cluster.agents[0].assert_nothing_is_left()
        cluster.ended({1: 3})
        assert re.search(r"node0:2379|10\.77\.0\.1:2379", cluster.agents[1].stderr)


def asleep(folder: Path) -> Path:
    """A program without collectives: its workers do not notice that another rank is lost."""
    return script(folder, "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n", "asleep.py")


@pytest.mark.slow
def test_a_program_that_notices_nothing_ends_when_the_heads_host_has_lost_its_power(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2, head=True) as cluster:
        # With an address there is nothing to look up, and the kernel's error changes: no answer, no route to the host.
        cluster.endpoints = f"{cluster.nodes[0].ipv4}:2379"
        cluster.start(0, 1, nnodes="2", options=SHORT, program=asleep(tmp_path), env=TOKEN)
        other = cluster.agents[1]
        other.wait_for_output("asleep")

        cluster.nodes[0].power_off()
        since_s = time.monotonic()

        cluster.ended({1: 3})
        assert time.monotonic() - since_s < 40, other.stderr
        lines = [line for line in other.stderr.splitlines() if "the store is" in line]
        assert len(lines) == 1, other.stderr
        assert "the workers continue, and are stopped in" in lines[0]
        assert "type its command on all nodes; if the host that served the store stays down" in other.stderr


def test_a_killed_store_ends_no_training_and_no_node_with_finished_workers_waits_for_it(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2, head=True) as cluster:
        cluster.start(0, 1, nnodes="2", options=SHORT, env=TOKEN)
        meeting = cluster.meeting(2)
        head, other = cluster.agents[0], cluster.agents[1]

        head.child("elaunch: job store").kill()
        head.wait_for_output(r"the job's store, .* was killed by SIGKILL; the workers continue")
        other.wait_for_output(r"the store is unreachable: .*; trying again; the workers continue")
        cluster.goes_on(meeting)
        (tmp_path / "end").touch()
        since_s = time.monotonic()
        codes = [head.wait(), other.wait()]
        took_s = time.monotonic() - since_s

        assert codes == [3, 3], cluster.story()
        for node in (head, other):
            assert "this node's workers had all exited with 0" in node.stderr
        # The other node's store_timeout began at the kill. Its default of a minute would take longer than this.
        assert took_s < 50


def test_a_head_that_is_started_again_has_no_history_and_the_others_end(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2, head=True) as cluster:
        cluster.start(0, 1, nnodes="2", env=TOKEN)
        first = cluster.meeting(2)

        cluster.agents[0].kill_agent()
        # The old store has its port until then.
        cluster.agents[0].assert_nothing_is_left()
        cluster.start(0, nnodes="2", env=TOKEN)

        assert cluster.agents[1].wait() == 3
        assert "was restarted and has lost this job" in cluster.agents[1].stderr
        cluster.assert_nothing_is_left(cluster.nodes[1])
        assert not any(is_alive(first.pid(rank)) for rank in range(2))
