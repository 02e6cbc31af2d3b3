"""HSDP on four nodes, two replicas of two shards: whichever two nodes are lost, what the job goes on from is whole.

A loss takes all that a node's memory has: the pieces of its own rank, and those that the node before has sent it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("replicas.py")
RANKS = range(4)
STEPS = 14
# Snapshots of steps 1, 6 and 11, copies of all others from step 2 on, a checkpoint of step 8.
STRUCK, SNAPSHOT, CHECKPOINT = 13, 11, 8


class Job:
    """Four nodes after all their workers were killed in the forward pass of step 13. `digests` are by rank and step."""

    def __init__(self, forker: RankForker, folder: Path, memories: list[Path], *words: str) -> None:
        self._forker, self._memories, self._words = forker, memories, words
        self.folder = folder
        with self._begin(0, folder, memories) as ranks:
            ended = ranks.end()
        assert [rank.code for rank in ended] == [-9] * 4, ended[0].err
        self.digests = {(r, its["step"]): its["digest"] for r in RANKS for its in ended[r].notes}

    def resumed_without(self, lost: tuple[int, ...], folder: Path, memories: list[Path]) -> list[list[Any]]:
        """What the ranks print that go on from what the other nodes have, by rank."""
        shutil.copytree(self.folder, folder)
        for node in set(RANKS) - set(lost):
            shutil.copytree(self._memories[node], memories[node], dirs_exist_ok=True)
        with self._begin(1, folder, memories) as ranks:
            ranks.answers()
            return [ended.notes for ended in ranks.end()]

    def _begin(self, generation: int, folder: Path, memories: list[Path]) -> Ranks:
        envs = {rank: {"ELAUNCH_MEMORY": str(memory), "LOCAL_RANK": "0"} for rank, memory in enumerate(memories)}
        words = (str(folder), str(STEPS), str(STRUCK), *self._words)
        return Ranks(self._forker, 4, SCRIPT, *words, env={"ELAUNCH_GENERATION": str(generation)}, envs=envs)


def _memories(stack: ExitStack) -> list[Path]:
    return [Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) for _ in RANKS]


@pytest.fixture(scope="module")
def killed(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:
        yield cache(lambda *words: Job(forker, tmp_path_factory.mktemp("job"), _memories(stack), *words))


@pytest.fixture
def memories() -> Iterator[list[Path]]:
    with ExitStack() as stack:
        yield _memories(stack)


def assert_goes_on(job: Job, step: int, resumed: list[list[Any]]) -> None:
    """All ranks began at that step, with the same bits as before, and went on with the same bits."""
    for rank, (*notes, ended) in enumerate(resumed):
        assert ended["began"] == step, resumed[0][-1]["said"]
        assert ended["repeated"] == STRUCK - 1 - step
        assert [its["step"] for its in notes] == list(range(step, STEPS + 1))
        for its in notes:
            assert its["digest"] == job.digests.get((rank, its["step"]), its["digest"])
    # The replicas are the same to the end.
    assert [its["digest"] for its in resumed[0][:-1]] == [its["digest"] for its in resumed[2][:-1]]


@pytest.mark.parametrize("lost", [(0, 1), *(pytest.param(p, marks=pytest.mark.slow) for p in [(2, 3), (0, 3), (1, 2)])])
def test_two_nodes_with_different_shards_cost_no_step(
    killed: Callable[..., Job], tmp_path: Path, memories: list[Path], lost: tuple[int, ...]
) -> None:
    resumed = killed().resumed_without(lost, tmp_path / "run", memories)

    assert_goes_on(killed(), STRUCK - 1, resumed)
    # The node after a rank's own has its random state too, as of the snapshot.
    (alone,) = [rank for rank in lost if (rank + 1) % 4 in lost]
    (other,) = set(lost) - {alone}
    (said,) = [text for text in resumed[0][-1]["said"] if text.startswith("restored")]
    assert said.startswith(f"restored step {STRUCK - 1} from memory (of generation 0")
    assert f"the random state of rank {other} is that of step {SNAPSHOT}" in said
    assert f"the random state of rank {alone} is lost and new" in said


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(0, 2), (1, 3), (0, 1, 2), (1, 2, 3)])
def test_all_nodes_with_a_shard_cost_the_steps_since_the_snapshot(
    killed: Callable[..., Job], tmp_path: Path, memories: list[Path], lost: tuple[int, ...]
) -> None:
    resumed = killed().resumed_without(lost, tmp_path / "run", memories)

    assert_goes_on(killed(), SNAPSHOT, resumed)
    assert f"restored step {SNAPSHOT} from memory (of generation 0" in resumed[0][-1]["said"][0]
