"""What is a rank's alone is in the memory of a second node: a lost node changes no bit of what follows a snapshot."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.faults.test_keeper_kills import KEPT, Run
from tests.harness import slow
from tests.ranks import Nursery, Ranks, nursery

STEPS = 24


@pytest.fixture(scope="module", name="nursery")
def _nursery() -> Iterator[Nursery]:
    with nursery() as held:
        yield held


@pytest.fixture
def memories() -> Iterator[list[Path]]:
    """One folder in shared memory for each of two nodes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        yield [Path(one), Path(other)]


class Nodes(Run):
    """A training by `kept.py` on nodes that are this one, with a worker and a memory each."""

    def __init__(self, folder: Path, nursery: Nursery, memories: list[Path], *options: str) -> None:
        folder.mkdir()
        self.folder, self.nursery, self.memories, self.options = folder, nursery, memories, options

    def generation(self, number: int, asks: Iterable[str] = ()) -> list[int]:
        """Exit codes by rank."""
        for ask in asks:
            (self.folder / ask).touch()
        env = {"ELAUNCH_GENERATION": str(number)}
        envs = {rank: {"ELAUNCH_MEMORY": str(path), "LOCAL_RANK": "0"} for rank, path in enumerate(self.memories)}
        with Ranks(
            self.nursery, len(envs), KEPT, str(self.folder), str(STEPS), *self.options, env=env, envs=envs
        ) as ranks:
            ended = ranks.end()
        self.said = "".join(rank.err for rank in ended)
        return [rank.code for rank in ended]


@pytest.mark.parametrize(
    ("option", "lost"), [("hook=powersgd", 1), ("stop_every=1", 0), ("shards=fsdp2", 1), slow("hook=powersgd", 0)]
)
def test_a_lost_nodes_own_state_is_that_of_the_last_snapshot_to_the_bit(
    tmp_path: Path, nursery: Nursery, memories: list[Path], option: str, lost: int
) -> None:
    options = ("snapshot_every=5", option)
    stormy = Nodes(tmp_path / "stormy", nursery, memories, *options)
    # Snapshots after step 1, 6, 11, 16; all die in step 20.
    assert stormy.generation(0, ["together-0-20-0", "together-0-20-1"]) == [-9, -9]
    shutil.rmtree(memories[lost])
    memories[lost].mkdir()

    assert stormy.generation(1) == [0, 0], stormy.said

    assert stormy.began(1) == 16
    assert "restored step 16 from memory (of generation 0" in stormy.said
    assert "3 steps are repeated" in stormy.said
    assert "lost" not in stormy.said
    assert "anew" not in stormy.said
    calm = Nodes(tmp_path / "calm", nursery, [], *options)
    for memory in memories:
        calm.memories.append(memory / "calm")
        calm.memories[-1].mkdir()
    assert calm.generation(0) == [0, 0], calm.said
    assert stormy.ends == calm.ends
