"""Snapshots of sharded state in real groups: workers killed, a node lost, another world size, torn and full memory."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RUN_LIMIT_S, slow, wait_for
from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("shards.py")
KINDS = ["fsdp2", slow("fsdp1"), "zero"]
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


one_node = pytest.mark.parametrize("nodes", [1], indirect=True)


# With FSDP2 the tests of lost nodes and of other sizes have what is restored.
@one_node
@pytest.mark.parametrize("kind", [slow("fsdp2"), slow("fsdp1"), "zero"])
def test_a_killed_rank_costs_the_steps_since_the_snapshot(nodes: Nodes, kind: str) -> None:
    actions = ("train", "2", "save", "note", "train", "1", "save", "note", "train", "1", "kill", "2")
    with nodes.begin(3, kind, *actions) as ranks:
        ended = ranks.end_of(2)
    assert ended.code == -9
    at_two, at_three = ended.notes

    loaded = nodes.run(3, kind, "load", generation=1)[0]

    assert (loaded["loaded"], loaded["step"], loaded["digest"]) == ([0, 3], 3, at_three["digest"])
    assert loaded["digest"] != at_two["digest"]


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_group_and_a_larger_one_after_it_cut_the_state_anew(nodes: Nodes, saved: Saved, kind: str) -> None:
    before, answer = saved(kind)
    nodes.take_over(before)
    nodes.lose(1)

    for generation, world_size in enumerate((3, 4), start=1):
        loaded = nodes.run(world_size, kind, "load", "save", generation=generation)[0]

        assert (loaded["loaded"], loaded["step"]) == ([generation - 1, 3], 3)
        assert loaded["digest"] == answer["digest"]


def test_two_lost_neighbours_are_too_many(nodes: Nodes, saved: Saved) -> None:
    before, first = saved(LIGHT)
    nodes.take_over(before)
    nodes.lose(0)
    nodes.lose(1)

    answer = nodes.run(4, LIGHT, "load", "train", "1", generation=1)[0]

    (fresh,) = first["notes"]
    assert (answer["loaded"], answer["step"], answer["digest"]) == (None, 1, fresh["digest"])


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


@one_node
@pytest.mark.parametrize("moment", [slow("copy"), "unmarked"])
def test_a_rank_killed_inside_a_snapshot_leaves_the_version_before(nodes: Nodes, moment: str) -> None:
    actions = ["train", "2", "save", "note", "train", "1", "save", "note", "train", "1", "die", moment, "1", "save"]
    with nodes.begin(3, LIGHT, *actions) as ranks:
        ended = ranks.end_of(1)
    assert ended.code == -9
    at_two, at_three = ended.notes

    loaded = nodes.run(3, LIGHT, "load", generation=1)[0]

    assert (loaded["loaded"], loaded["digest"]) == ([0, 3], at_three["digest"])
    assert loaded["digest"] != at_two["digest"]


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(folder)], capture_output=True, timeout=RUN_LIMIT_S
    )
    if mounted.returncode:
        pytest.skip(f"mounting a file system needs root: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=RUN_LIMIT_S)


def test_memory_that_does_not_suffice_is_a_sentence_and_training_goes_on(
    forker: RankForker, tmp_path: Path, small_memory: Path
) -> None:
    nodes = Nodes(forker, tmp_path, [small_memory])

    answers = nodes.run(3, LIGHT, "train", "1", "save", "train", "1", "save", "train", "1")

    said = [sentence for answer in answers for sentence in answer["said"]]
    assert answers[0]["step"] == 3
    assert 1 <= len(said) <= 3
    assert (
        f"no room for a snapshot of 0.0 MB in {small_memory} (No space left on device; 0.0 MB are free there)"
        in said[0]
    )
    assert nodes.pieces(0) == []


def test_memory_that_does_not_suffice_for_the_other_nodes_part_ends_second_copies_and_nothing_else(
    nodes: Nodes, small_memory: Path
) -> None:
    # Room for two pieces, not for three: the second version of this node's own piece has none.
    nodes.memories[1] = small_memory

    answers = nodes.run(2, LIGHT, "train", "1", "save", "train", "1", "save", "train", "1")

    assert answers[0]["step"] == 3
    assert answers[0]["said"] == []
    assert len(answers[1]["said"]) == 1
    assert (
        f"rank 1: there are no more second copies on other nodes (no room in {small_memory} for other nodes' parts: No "
        in (answers[1]["said"][0])
    )
    assert [path.name for path in nodes.pieces(0)] == ["piece-0-0", "piece-0-1"]
    assert [path.name for path in nodes.pieces(1)] == ["piece-1-0", "piece-1-1"]
    assert nodes.run(2, LIGHT, "load", generation=1)[0]["loaded"] == [0, 2]


def test_a_newer_snapshot_replaces_the_old_one_only_when_it_is_whole_on_both_nodes(nodes: Nodes) -> None:
    saved = nodes.run(2, LIGHT, "train", "2", "save")[0]
    # Rank 1 is killed before it has sent its part of the next snapshot to the other node.
    actions = ["load", "train", "1", "die", "unsent", "1", "begin"]
    with nodes.begin(2, LIGHT, *actions, generation=1) as ranks:
        assert ranks.end_of(1).code == -9
        wait_for(lambda: nodes.is_whole(0, "piece-0-1"), "rank 0's part")
    nodes.lose(1)

    loaded = nodes.run(2, LIGHT, "load", generation=2)[0]

    assert (loaded["loaded"], loaded["digest"]) == ([0, 2], saved["digest"])


def test_a_part_that_arrives_garbled_on_the_second_node_does_not_count_and_is_said(nodes: Nodes) -> None:
    actions = ("train", "1", "save", "train", "1", "garble", "1", "save", "note", "die", "copy", "0")
    with nodes.begin(2, LIGHT, *actions, "train", "1", "begin") as ranks:
        ended = ranks.end_of(0)
        assert ended.code == -9
        ranks.kill([1])
        said = [note["said"] for note in (*ended.notes, *ranks.end_of(1).notes)]
    nodes.lose(0)

    loaded = nodes.run(2, LIGHT, "load", generation=1)[0]

    assert loaded["loaded"] == [0, 1]
    # The rank at which the part arrived has reported the damage.
    assert said[0] == []
    assert (
        "no more second copies on other nodes (rank 0's part arrived damaged at rank 1: its checksum is wrong)"
        in said[1][0]
    )


def test_a_rank_without_room_for_its_record_keeps_step_with_the_others(tmp_path: Path, forker: RankForker) -> None:
    with Ranks(forker, 2, Path(__file__).with_name("unlike.py"), str(tmp_path)) as ranks:
        assert ranks.answers() == [[[0, 1], 1]] * 2
