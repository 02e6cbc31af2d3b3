"""The trainer's state on several nodes: a rank without it gets it from a peer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.keeper_runs import KEPT, PRELOAD, Calm, Kept
from tests.harness import wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

TOKEN = {"ELAUNCH_TOKEN": "the token of this test", "OMP_NUM_THREADS": "1"}


# The third node imports torch too.
@pytest.mark.slow
def test_a_replaced_node_gets_the_state_from_a_peer(tmp_path: Path, calm: Calm) -> None:
    """A training by `kept.py` on two nodes. One loses its only worker in step 20, and is replaced in step 33."""
    (tmp_path / "run").mkdir()
    run = Kept(tmp_path / "run")
    for name in ("forward-0-20-1", "hold-1-33-0"):
        (run.folder / name).touch()
    # A host's own name means loopback to itself, as Debian installs it.
    with Cluster(tmp_path, 3, head=True, own_name_is_loopback=True) as cluster:
        words = [*PRELOAD, "--nnodes", "2", "--rdzv-endpoint", cluster.endpoints, "--max-restarts", "9"]
        words += [str(KEPT), str(run.folder), "40", "lose_at_most=1000"]
        for index in (0, 1):
            cluster.type(index, *words, env=TOKEN)
        wait_for(lambda: run.of("held"), "step 33")
        # A node that is killed has to be lost soon.
        cluster.agents.pop(1).kill_agent()
        cluster.type(2, *words, env=TOKEN)
        cluster.ended(dict.fromkeys(cluster.agents, 0))
        output = "".join(agent.output for agent in cluster.agents.values())

    before = {place: loss for place, loss in run.losses.items() if place[1] < 33}
    assert before.items() <= calm(2).losses.items()
    assert {step for _, step in before} == set(range(1, 33))
    assert run.began(2) == 32
    # The new generation's first snapshot, of step 19, was on both nodes.
    assert re.findall(r"restored step .*", output)[1] == (
        "restored step 32 from memory (of generation 1; sent to rank 1 from rank 0); 0 steps are repeated; "
        "the random state of rank 1 is that of step 19"
    )
    assert len({r["replicated"] for r in run.of("end")}) == 1
