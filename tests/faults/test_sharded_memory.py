"""Snapshots of sharded state in real groups: workers killed, a node lost, another world size, torn and full memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("shards.py")
# For tests that are not about the kind: the first steps of FSDP2 take each rank half a second of CPU time.
LIGHT = "zero"


class Nodes:
    """Groups of ranks one after the other, with one folder in shared memory per node."""

    def __init__(self, forker: RankForker, folder: Path, memories: list[Path]) -> None:
        self.forker, self.folder, self.memories = forker, folder, memories

    def begin(self, world_size: int, kind: str, *actions: str, generation: int = 0) -> Ranks:
        env = {"FOLDER": str(self.folder), "ELAUNCH_GENERATION": str(generation)}
        nodes = len(self.memories)
        envs = {rank: {"ELAUNCH_MEMORY": str(self.memories[rank * nodes // world_size])} for rank in range(world_size)}
        return Ranks(self.forker, world_size, SCRIPT, kind, "memory", *actions, env=env, envs=envs)

    def run(self, world_size: int, kind: str, *actions: str, generation: int = 0) -> list[Any]:
        """Run a group. Returns the ranks' answers, which must have the same digest."""
        with self.begin(world_size, kind, *actions, generation=generation) as ranks:
            answers = ranks.answers()
        assert len({answer["digest"] for answer in answers}) == 1
        return answers

    def lose(self, node: int) -> None:
        """Replace the node by a new one, whose memory is empty."""
        shutil.rmtree(self.memories[node])
        self.memories[node].mkdir()


@pytest.fixture
def nodes(forker: RankForker, tmp_path: Path) -> Iterator[Nodes]:
    folders = [tempfile.TemporaryDirectory(dir="/dev/shm") for _ in range(2)]
    yield Nodes(forker, tmp_path, [Path(folder.name) for folder in folders])
    for folder in folders:
        folder.cleanup()


@pytest.mark.parametrize(("kind", "lost"), [("fsdp2", 0), ("zero", 1)])
def test_a_lost_node_is_made_up_for_by_the_other(nodes: Nodes, kind: str, lost: int) -> None:
    answer = nodes.run(4, kind, "train", "3", "save")[0]
    nodes.lose(lost)

    loaded = nodes.run(4, kind, "load", "save", generation=1)[0]

    assert (loaded["loaded"], loaded["digest"]) == ([0, 3], answer["digest"])
    # The next time the other node may be lost.
    nodes.lose(1 - lost)
    again = nodes.run(4, kind, "load", generation=2)[0]
    assert (again["loaded"], again["digest"]) == ([1, 3], answer["digest"])


def test_a_part_that_arrives_garbled_on_the_second_node_does_not_count_and_is_said(nodes: Nodes) -> None:
    answers = nodes.run(2, LIGHT, "train", "1", "save", "train", "1", "garble", "1", "save", "note")
    said = [answer["notes"][0]["said"] for answer in answers]
    nodes.lose(0)

    # The snapshot before is still on both nodes.
    assert nodes.run(2, LIGHT, "load", generation=1)[0]["loaded"] == [0, 1]
    # The rank at which the part arrived has reported the damage.
    assert said[0] == []
    assert (
        "no more second copies on other nodes (rank 0's part arrived damaged at rank 1: its checksum is wrong)"
        in said[1][0]
    )
