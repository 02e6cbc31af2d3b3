"""Snapshots of a sharded state in a real group: a node is lost."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("shards.py")


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


def test_a_lost_node_is_made_up_for_by_the_other(nodes: Nodes) -> None:
    answer = nodes.run(4, "fsdp2", "train", "3", "save")[0]
    nodes.lose(0)

    loaded = nodes.run(4, "fsdp2", "load", "save", generation=1)[0]

    assert (loaded["loaded"], loaded["digest"]) == ([0, 3], answer["digest"])
    # The next time the other node may be lost.
    nodes.lose(1)
    again = nodes.run(4, "fsdp2", "load", generation=2)[0]
    assert (again["loaded"], again["digest"]) == ([1, 3], answer["digest"])
