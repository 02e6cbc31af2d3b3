"""HSDP on four nodes with an agent each, two replicas of two shards: two nodes lose their power at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster import Cluster
from tests.faults.keeper_runs import PRELOAD
from tests.faults.test_lost_replicas import SCRIPT, SNAPSHOT, STEPS, STRUCK
from tests.harness import wait_for
from tests.nodes import needs_nodes

pytestmark = [needs_nodes, pytest.mark.slow]


class Replicas:
    """A training by `replicas.py` on the nodes of a cluster, one rank each, held in step STRUCK of generation 0."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster

    def start(self, *indices: int, nnodes: str) -> None:
        words = [*PRELOAD, "--nnodes", nnodes, "--rdzv-endpoint", self.cluster.endpoints, "--rdzv-id", "job"]
        words += ["--max-restarts", "3", str(SCRIPT), str(self.folder), str(STEPS), str(STRUCK)]
        for index in indices:
            self.cluster.type(index, *words, "held", env={"OMP_NUM_THREADS": "1"})

    def lose(self, *indices: int) -> None:
        """The power of these nodes is cut, all at once."""
        for index in indices:
            self.cluster.nodes[index].power_off()
        for index in indices:
            lost = self.cluster.agents.pop(index)
            wait_for(lambda: lost.process.poll() is not None, "the agent's end")  # noqa: B023

    def notes(self, index: int) -> list[dict[str, Any]]:
        """What the ranks on that node have printed, in all generations."""
        found = re.findall(r"^(?:\[\d+\] )?(\{.*\})$", self.cluster.agents[index].stdout, re.MULTILINE)
        return [json.loads(text) for text in found]

    def wait_until_held(self) -> None:
        def are_held() -> bool:
            return all(any("held" in note for note in self.notes(index)) for index in self.cluster.agents)

        try:
            wait_for(are_held, "all ranks come to the step")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.cluster.story()}") from None

    def resumed(self, index: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The notes of the last generation's rank on that node: those of its steps, and the one at its end."""
        *notes, end = self.notes(index)
        first = [number for number, note in enumerate(notes) if note.get("step") == end["began"]][-1]
        return notes[first:], end


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    (tmp_path / "run").mkdir()
    with Cluster(tmp_path, 6) as cluster:
        yield Replicas(tmp_path / "run", cluster)


@pytest.mark.parametrize(
    ("lost", "new", "step"),
    # Different shards, and no other node for them: two ranks go on. Both replicas of a shard, and two other nodes.
    [((0, 1), (), STRUCK - 1), ((0, 2), (4, 5), SNAPSHOT)],
)
def test_two_nodes_that_are_lost_at_once_cost_no_step_while_each_shard_has_a_replica_and_else_those_since_the_snapshot(
    replicas: Replicas, lost: tuple[int, ...], new: tuple[int, ...], step: int
) -> None:
    nnodes = "4" if new else "2:4"
    replicas.start(0, 1, 2, 3, nnodes=nnodes)
    replicas.wait_until_held()
    before = {note["step"]: note["whole"] for note in replicas.notes(3) if "step" in note}

    replicas.lose(*lost)
    replicas.start(*new, nnodes=nnodes)
    left = [index for index in range(6) if index in replicas.cluster.agents]
    replicas.cluster.ended(dict.fromkeys(left, 0))

    assert len(left) == (4 if new else 2)
    for index in left:
        notes, end = replicas.resumed(index)
        assert (end["began"], end["repeated"]) == (step, STRUCK - 1 - step), end["said"]
        assert [note["step"] for note in notes] == list(range(step, STEPS + 1))
        assert notes[0]["whole"] == before[step]
        if new:
            # As many ranks as before compute the same bits.
            assert [note["whole"] for note in notes if note["step"] in before] == [
                before[note["step"]] for note in notes if note["step"] in before
            ]
    assert len({replicas.resumed(index)[0][-1]["whole"] for index in left}) == 1
