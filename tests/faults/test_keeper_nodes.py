"""The trainer's state on several nodes: who lacks it gets it from a peer, and nodes come and go between two steps."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.keeper_runs import KEPT, Calm, Recorded, assert_same
from tests.harness import wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

TOKEN = {"ELAUNCH_TOKEN": "the token of this test", "OMP_NUM_THREADS": "1"}


class Nodes(Recorded):
    """A training by `kept.py` on the nodes of a cluster, one worker each."""

    def __init__(self, folder: Path, nodes: Cluster) -> None:
        super().__init__(folder)
        self.cluster = nodes

    def start(self, *indices: int, nnodes: str, steps: int = 40, options: tuple[str, ...] = ()) -> None:
        words = ["--nnodes", nnodes, "--rdzv-endpoint", self.cluster.endpoints, "--max-restarts", "9", str(KEPT)]
        for index in indices:
            self.cluster.type(index, *words, str(self.folder), str(steps), "snapshot_every=1000", *options, env=TOKEN)

    def wait_for(self, event: str, **fields: object) -> None:
        try:
            wait_for(lambda: self.of(event, **fields), f"{event} {fields}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def release(self, name: str) -> None:
        (self.folder / name).unlink()

    def output(self) -> str:
        return "".join(agent.output for agent in self.cluster.agents.values())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    folder = tmp_path / "run"
    folder.mkdir()
    with Cluster(tmp_path, 3, head=True) as cluster:
        yield Nodes(folder, cluster)


def test_a_node_whose_only_worker_died_gets_the_step_from_a_peer_and_its_own_part_from_its_memory(
    nodes: Nodes, calm: Calm
) -> None:
    (nodes.folder / "forward-0-20-1").touch()
    nodes.start(0, 1, nnodes="2")
    nodes.cluster.ended({0: 0, 1: 0})

    assert nodes.of("killed", step=20, rank=1)
    assert "restored step 19 from memory (of generation 0; sent to rank 1 from rank 0); 0 steps" in nodes.output()
    assert "lost" not in nodes.output()
    assert_same(nodes, calm(2))


def test_a_replaced_node_gets_the_state_from_a_peer(nodes: Nodes) -> None:
    (nodes.folder / "hold-0-20-0").touch()
    nodes.start(0, 1, nnodes="2")
    nodes.wait_for("held")

    nodes.cluster.agents.pop(1).kill_agent()
    nodes.start(2, nnodes="2")
    nodes.cluster.ended({0: 0, 2: 0})

    assert nodes.began(1) == 19
    assert (
        "restored step 19 from memory (of generation 0; sent to rank 1 from rank 0); 0 steps are repeated; "
        "the random state of rank 1 is that of step 1\n" in nodes.output()
    )
    assert len({r["replicated"] for r in nodes.of("end")}) == 1


def test_a_node_that_joins_interrupts_no_step_and_one_that_leaves_neither(nodes: Nodes) -> None:
    for name in ("hold-0-20-0", "hold-1-30-0"):
        (nodes.folder / name).touch()
    nodes.start(0, nnodes="1:2")
    nodes.wait_for("held", generation=0)

    nodes.start(1, nnodes="1:2")
    nodes.wait_for("told", reason="join")
    nodes.release("hold-0-20-0")
    nodes.wait_for("held", generation=1)
    assert "restored step 20 from memory (of generation 0; sent to rank 1 from rank 0); 0 steps" in nodes.output()

    leaving = nodes.cluster.agents.pop(1)
    leaving.signal(signal.SIGTERM)
    nodes.wait_for("told", reason="leave", rank=1)
    nodes.release("hold-1-30-0")
    assert leaving.wait() in (0, 143), leaving.output
    nodes.cluster.ended({0: 0})

    assert nodes.began(2) == 30
    assert "restored step 30 from memory (of generation 1); 0 steps are repeated" in nodes.output()
    done = [(r["step"]) for r in nodes.of("done", rank=0)]
    assert done == list(range(1, 41))
    assert len(re.findall("stopped after step (20|30)", nodes.output())) == 2
