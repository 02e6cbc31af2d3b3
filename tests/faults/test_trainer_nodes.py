"""The bundled trainer on nodes that are lost, join and are preempted at awkward moments: no step is lost."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.node_trainings import OnNodes
from tests.faults.trainings import GENTLE, RESTORED, CalmTrainings, Trained
from tests.nodes import needs_nodes

pytestmark = needs_nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[OnNodes]:
    with Cluster(tmp_path, 3) as cluster:
        yield OnNodes(tmp_path / "run", cluster)


@pytest.fixture
def calm(calm_training: CalmTrainings) -> Trained:
    """A run of two workers without failures."""
    return calm_training(2, *GENTLE)


# In the last two cases rank 0 has done step 12, and waits in the next step. A copy is made when its step is done, after
# the ranks were asked whether one of them wants to stop.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "begins"),
    [
        ("forward", [11, 20, 30]),
        ("backward", [11, 20, 30]),
        ("optimizer", [12, 20, 30]),
        ("copy", [12, 21, 31]),
    ],
)
def test_a_node_is_lost_another_joins_and_is_preempted(
    nodes: OnNodes, calm: Trained, moment: str, begins: list[int]
) -> None:
    names = [f"{moment}-0-12-1", f"{moment}-1-20-0", f"{moment}-2-30-0"]
    for name in names:
        nodes.ask(f"hold:{name}")
    options = (*GENTLE, "--lose-at-most", "1" if moment == "copy" else "1000")

    nodes.start(0, 1, nnodes="1:2", options=options)
    nodes.wait_for("held", generation=0)
    nodes.lose(1)

    nodes.wait_for("held", generation=1)
    nodes.start(2, nnodes="1:2", options=options)
    nodes.wait_for("told", reason="join")
    nodes.release(names[1])

    nodes.wait_for("held", generation=2)
    preempted = nodes.cluster.agents.pop(2)
    preempted.signal(signal.SIGTERM)
    nodes.wait_for("told", reason="leave")
    nodes.release(names[2])
    assert preempted.wait() in (0, 143), preempted.output
    nodes.cluster.ended({0: 0})

    assert nodes.struck("held") == names
    assert [nodes.began(generation) for generation in (1, 2, 3)] == begins
    assert {repeated for *_, repeated in re.findall(RESTORED, nodes.output)} == {"0"}
    assert {line["world_size"] for line in nodes.lines} == {1, 2}
    nodes.assert_complete()
    nodes.assert_close(calm)
