"""The bundled trainer with each plan on two nodes: a worker is killed, a node is lost, and the results are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.node_trainings import OnNodes
from tests.faults.trainings import GENTLE, CalmTrainings
from tests.nodes import needs_nodes

pytestmark = [needs_nodes, pytest.mark.slow]

STEPS = 12
# With tp=4 each worker has one of four heads.
SHAPE = (*GENTLE, "--steps", str(STEPS), "--micro-batch", "3", "--layers", "4", "--heads", "4")
# Ranks 0 and 1 are on one node, 2 and 3 on the other. With `pp` each node has a stage, with `tp` halves of matrices.
PLANS = ["ddp", "zero1", "zero2", "fsdp2", "hsdp", "dp=2,tp=2", "dp=2,pp=2,schedule=gpipe", "tp=2,pp=2"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_worker_is_killed_a_node_is_lost_and_at_most_one_step_each_is_repeated(
    tmp_path: Path, calm_training: CalmTrainings, plan: str
) -> None:
    options = (*SHAPE, "--parallel", plan)
    calm = calm_training(4, *options, steps=STEPS)

    with Cluster(tmp_path, 3) as cluster:
        run = OnNodes(tmp_path / "run", cluster)
        run.ask("loss-0-4-1")
        run.ask("hold:loss-1-8-3")
        words = (*options, "--lose-at-most", "0")
        run.start(0, 1, nnodes="2", workers=2, options=words)
        run.wait_for("began", generation=0, rank=3)
        run.start(2, nnodes="2", workers=2, options=words)
        run.wait_for("held", generation=1)
        run.lose(1)
        run.ended(0, 2)

    assert (run.struck(), run.struck("held")) == (["loss-0-4-1"], ["loss-1-8-3"])
    # 3 and 7 steps were done.
    lost = [3 - run.began(1), 7 - run.began(2)]
    print(f"{plan}: {lost} steps were lost")
    assert all(0 <= steps <= 1 for steps in lost)
    run.assert_complete(lost=sum(lost), steps=STEPS)
    run.assert_same(calm)
