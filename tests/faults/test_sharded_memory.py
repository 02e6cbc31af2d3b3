"""Snapshots of sharded state in real groups: workers killed, a node lost, another world size, torn and full memory."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness import slow
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

    def take_over(self, other: Nodes) -> None:
        """Copy the memories of those nodes into these."""
        for memory, source in zip(self.memories, other.memories, strict=True):
            shutil.copytree(source, memory, dirs_exist_ok=True)

    def is_whole(self, node: int, name: str) -> bool:
        path = self.memories[node] / name
        # The mark at its beginning is written last (trainer/state/region.py, which imports torch).
        return path.exists() and any(path.read_bytes()[:8])

    def pieces(self, node: int) -> list[Path]:
        return sorted(self.memories[node].glob("piece-*"))


@pytest.fixture
def nodes(forker: RankForker, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """As many nodes as the test's parameter, else two."""
    folders = [tempfile.TemporaryDirectory(dir="/dev/shm") for _ in range(getattr(request, "param", 2))]
    yield Nodes(forker, tmp_path, [Path(folder.name) for folder in folders])
    for folder in folders:
        folder.cleanup()


Saved = Callable[[str], tuple[Nodes, Any]]


@pytest.fixture(scope="module")
def saved(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """Snapshots of step 3 and answers of four ranks of a kind on two nodes; a note is of step 1. Tests use copies."""
    with ExitStack() as stack:

        @functools.cache
        def save(kind: str) -> tuple[Nodes, Any]:
            memories = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) for _ in range(2)]
            nodes = Nodes(forker, tmp_path_factory.mktemp(kind), memories)
            return nodes, nodes.run(4, kind, "train", "1", "note", "train", "2", "save")[0]

        yield save


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("fsdp2", 0), slow("fsdp2", 1), slow("fsdp1", 0), slow("fsdp1", 1), slow("zero", 0), ("zero", 1)],
)
def test_a_lost_node_is_made_up_for_by_the_other(nodes: Nodes, saved: Saved, kind: str, lost: int) -> None:
    before, answer = saved(kind)
    nodes.take_over(before)
    nodes.lose(lost)

    loaded = nodes.run(4, kind, "load", "save", generation=1)[0]

    assert (loaded["loaded"], loaded["digest"]) == ([0, 3], answer["digest"])
    # The next time the other node may be lost.
    nodes.lose(1 - lost)
    again = nodes.run(4, kind, "load", generation=2)[0]
    assert (again["loaded"], again["digest"]) == ([1, 3], answer["digest"])


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_two_lost_neighbours_of_hsdp_are_made_up_for_by_their_replicas(nodes: Nodes) -> None:
    # One rank on each node. The third and the fourth are replicas of the first and the second.
    saved = nodes.run(4, "hsdp", "train", "2", "save", "note", "train", "1", "save")[0]
    # Rank 0's part of the newest snapshot was on these two nodes only.
    nodes.lose(0)
    nodes.lose(1)

    loaded = nodes.run(4, "hsdp", "load", generation=1)[0]

    assert (loaded["loaded"], loaded["digest"]) == ([0, 3], saved["digest"])
    assert loaded["digest"] != saved["notes"][0]["digest"]


def test_a_part_that_arrives_garbled_on_the_second_node_does_not_count_and_is_said(nodes: Nodes) -> None:
    actions = ("train", "1", "save", "train", "1", "garble", "1", "save", "note", "die", "copy", "0")
    with nodes.begin(2, LIGHT, *actions, "train", "1", "begin") as ranks:
        ended = ranks.end_of(0)
        assert ended.code == -9
        ranks.kill([1])
        said = [note["said"] for note in (*ended.notes, *ranks.end_of(1).notes)]
    nodes.lose(0)

    loaded = nodes.run(2, LIGHT, "load", generation=1)[0]

    # Both ranks have overwritten the newer snapshot, which did not count.
    assert loaded["loaded"] == [0, 1]
    # The rank at which the part arrived has reported the damage.
    assert said[0] == []
    assert (
        "rank 0's part of the snapshot is on its own node only: it arrived damaged at rank 1: its checksum is wrong"
        in said[1][0]
    )
