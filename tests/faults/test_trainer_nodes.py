"""The bundled trainer on nodes that are lost, join and are preempted at awkward moments: no step is lost."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.node_trainings import OnNodes
from tests.faults.trainings import GENTLE, RESTORED, CalmTrainings, OneNode, Trained
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


@pytest.mark.slow
def test_rank_0_is_lost_with_its_node_while_its_checkpoint_gets_its_name(nodes: OnNodes, calm: Trained) -> None:
    nodes.ask("hold:publish-0-20-0")
    nodes.ask("hold:forward-0-24-0")

    nodes.start(0, 1, nnodes="2", options=GENTLE)
    nodes.wait_for("held", moment="publish")
    nodes.wait_for("held", moment="forward")
    nodes.lose(0)
    nodes.start(2, nnodes="2", options=GENTLE)
    nodes.cluster.ended({1: 0, 2: 0})

    assert nodes.began(1) == 23
    names = sorted(path.name for path in (nodes.out / "checkpoints").iterdir() if path.is_dir())
    # That of step 20 was not complete, and is made up for at once; three are kept.
    assert names == [f"generation-0001-step-000000{step}" for step in (23, 30, 40)]
    nodes.assert_complete()
    # Both generations have the same size, and ranks keep no random state of their own, so the results are equal.
    nodes.assert_same(calm)


@pytest.mark.slow
def test_a_node_that_has_just_joined_is_lost_while_it_receives_the_state(nodes: OnNodes, calm: Trained) -> None:
    for name in ("forward-0-20-0", "restore-1-0-1", "forward-2-22-0"):
        nodes.ask(f"hold:{name}")

    nodes.start(0, nnodes="1:2", options=GENTLE)
    nodes.wait_for("held", generation=0)
    nodes.start(1, nnodes="1:2", options=GENTLE)
    nodes.wait_for("told", reason="join")
    nodes.release("forward-0-20-0")
    nodes.wait_for("held", generation=1)
    nodes.lose(1)
    nodes.wait_for("held", generation=2)
    nodes.release("forward-2-22-0")
    nodes.cluster.ended({0: 0})

    assert nodes.began(2) == 20
    nodes.assert_complete()
    nodes.assert_close(calm)


@pytest.mark.slow
def test_all_workers_of_a_node_are_killed_and_get_the_state_from_the_other(
    nodes: OnNodes, calm_training: CalmTrainings
) -> None:
    for rank in (0, 1):
        nodes.ask(f"together-0-20-{rank}")

    # No copy is due at step 19.
    nodes.start(0, 1, nnodes="2", workers=2, options=("--lose-at-most", "7"))
    nodes.cluster.ended({0: 0, 1: 0})

    assert sorted(nodes.struck()) == ["together-0-20-0", "together-0-20-1"]
    assert nodes.began(1) == 19
    assert "restored step 19 from memory (of generation 0; sent to rank 0 from rank 2); 0 steps" in nodes.output
    nodes.assert_complete()
    nodes.assert_same(calm_training(4))


@pytest.mark.slow
def test_a_run_resized_from_4_to_3_and_back_has_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    options = (*GENTLE, "--steps", "240")
    with OneNode(tmp_path / "calm", 4, *options) as calm:
        calm.ended()
    with Cluster(tmp_path, 5) as cluster:
        nodes = OnNodes(tmp_path / "run", cluster)
        for name in ("backward-0-81-3", "forward-1-161-0"):
            nodes.ask(f"hold:{name}")

        nodes.start(0, 1, 2, 3, nnodes="3:4", options=options)
        nodes.wait_for("held", generation=0)
        nodes.lose(3)
        nodes.wait_for("held", generation=1)
        nodes.start(4, nnodes="3:4", options=options)
        nodes.wait_for("told", reason="join")
        nodes.release("forward-1-161-0")
        cluster.ended(dict.fromkeys((0, 1, 2, 4), 0))

    assert [nodes.began(1), nodes.began(2)] == [80, 161]
    assert [line["world_size"] for line in nodes.lines] == [4] * 80 + [3] * 81 + [4] * 79
    nodes.assert_complete(steps=240)
    nodes.assert_close(calm)
