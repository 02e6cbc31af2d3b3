"""The trainer's state on several nodes: a rank without it gets it from a peer; nodes come and go between steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, Cluster
from tests.faults.keeper_runs import KEPT, PRELOAD, Calm, Recorded, assert_same
from tests.harness import wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

TOKEN = {"ELAUNCH_TOKEN": "the token of this test", "OMP_NUM_THREADS": "1"}


class Nodes(Recorded):
    """A training by `kept.py` on the nodes of a cluster, one worker each."""

    def __init__(self, folder: Path, nodes: Cluster) -> None:
        super().__init__(folder)
        self.cluster = nodes

    def start(
        self, *indices: int, nnodes: str, steps: int = 40, options: tuple[str, ...] = (), launch: tuple[str, ...] = ()
    ) -> None:
        """`options` are the program's, `launch` elaunch's."""
        words = [*PRELOAD, "--nnodes", nnodes, "--rdzv-endpoint", self.cluster.endpoints, "--max-restarts", "9"]
        words += [*launch, str(KEPT), str(self.folder), str(steps), "lose_at_most=1000", *options]
        for index in indices:
            self.cluster.type(index, *words, env=TOKEN)

    def wait_for(self, event: str, **fields: object) -> None:
        try:
            wait_for(lambda: self.of(event, **fields), f"{event} {fields}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def release(self, name: str) -> None:
        (self.folder / name).unlink()

    def output(self) -> str:
        return "".join(agent.output for agent in self.cluster.agents.values())


@contextmanager
def nodes_of(folder: Path, count: int) -> Iterator[Nodes]:
    (folder / "run").mkdir()
    # A host's own name means loopback to itself, as Debian installs it.
    with Cluster(folder, count, head=True, own_name_is_loopback=True) as cluster:
        yield Nodes(folder / "run", cluster)


@dataclass(frozen=True)
class Mended:
    """A training on two nodes, of which one lost its only worker in step 20. It may have been replaced in step 33."""

    run: Recorded
    restored: list[str]


def mend(folder: Path, *, replaces: bool) -> Mended:
    with nodes_of(folder, 3 if replaces else 2) as nodes:
        for name in ("forward-0-20-1", *(["hold-1-33-0"] if replaces else [])):
            (nodes.folder / name).touch()
        # A node that is killed has to be lost soon.
        nodes.start(0, 1, nnodes="2", launch=() if replaces else (*PATIENT, "--failure-grace", "60"))
        if replaces:
            nodes.wait_for("held")
            nodes.cluster.agents.pop(1).kill_agent()
            nodes.start(2, nnodes="2")
        nodes.cluster.ended(dict.fromkeys(nodes.cluster.agents, 0))
    return Mended(nodes, re.findall(r"restored step .*", nodes.output()))


@pytest.mark.slow
def test_a_node_whose_only_worker_died_gets_the_step_from_a_peer_and_its_own_part_from_its_memory(
    tmp_path: Path, calm: Calm
) -> None:
    mended = mend(tmp_path, replaces=False)

    assert mended.run.of("killed", step=20, rank=1)
    assert mended.restored[0] == (
        "restored step 19 from memory (of generation 0; sent to rank 1 from rank 0); 0 steps are repeated"
    )
    assert mended.run.halfway == calm(2).halfway
    assert_same(mended.run, calm(2))


# The third node imports torch too.
@pytest.mark.slow
def test_a_replaced_node_gets_the_state_from_a_peer(tmp_path: Path, calm: Calm) -> None:
    mended = mend(tmp_path, replaces=True)

    before = {place: loss for place, loss in mended.run.losses.items() if place[1] < 33}
    assert before.items() <= calm(2).losses.items()
    assert {step for _, step in before} == set(range(1, 33))
    assert mended.run.began(2) == 32
    # The new generation's first snapshot, of step 19, was on both nodes.
    assert mended.restored[1] == (
        "restored step 32 from memory (of generation 1; sent to rank 1 from rank 0); 0 steps are repeated; "
        "the random state of rank 1 is that of step 19"
    )
    assert len({r["replicated"] for r in mended.run.of("end")}) == 1


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with nodes_of(tmp_path, 2) as found:
        yield found
