"""State that only one rank has is also in the memory of a second node: after a lost node training ends bit for bit."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.faults.keeper_runs import KEPT, Kept
from tests.harness import slow
from tests.ranks import RankForker, Ranks

STEPS = 24


@pytest.fixture
def memories() -> Iterator[list[Path]]:
    """One folder in shared memory for each of two nodes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        yield [Path(one), Path(other)]


class Nodes(Kept):
    """A training by `kept.py` on simulated nodes of this host, with a worker and a memory each."""

    def __init__(self, folder: Path, forker: RankForker, memories: list[Path], *options: str) -> None:
        super().__init__(folder)
        folder.mkdir()
        self.forker, self.memories, self.options = forker, memories, options

    def generation(self, number: int, asks: Iterable[str] = ()) -> list[int]:
        """Run a generation to its end. Returns the exit codes by rank."""
        with self.begun(number, asks) as ranks:
            return self.ends_of(ranks)

    def begun(self, number: int, asks: Iterable[str] = ()) -> Ranks:
        for ask in asks:
            (self.folder / ask).touch()
        env = {"ELAUNCH_GENERATION": str(number)}
        envs = {rank: {"ELAUNCH_MEMORY": str(path), "LOCAL_RANK": "0"} for rank, path in enumerate(self.memories)}
        return Ranks(self.forker, len(envs), KEPT, str(self.folder), str(STEPS), *self.options, env=env, envs=envs)

    def ends_of(self, ranks: Ranks) -> list[int]:
        ended = ranks.end()
        self.logged = "".join(rank.err for rank in ended)
        return [rank.code for rank in ended]

    def lose(self, node: int) -> None:
        """Replace the node by another one, whose memory is empty."""
        shutil.rmtree(self.memories[node])
        self.memories[node].mkdir()


@pytest.fixture(scope="module")
def calm(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Nodes]:
    """The same training with that option, without any failure."""

    @functools.cache
    def run(option: str) -> Nodes:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
            folder = tmp_path_factory.mktemp("calm") / "run"
            calm = Nodes(folder, forker, [Path(one), Path(other)], "lose_at_most=10", option)
            assert calm.generation(0) == [0, 0], calm.logged
            return calm

    return run


def all_die(generation: int, step: int) -> list[str]:
    """Both ranks die at once in that step. What they have sent has arrived by then."""
    return [f"{what}-{generation}-{step}-{rank}" for what in ("settle", "together") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("option", "lost"),
    [("hook=powersgd", 1), slow("looks=1", 0), ("shards=fsdp2", 1), slow("hook=powersgd", 0)],
)
def test_a_lost_nodes_own_state_is_that_of_the_last_snapshot_to_the_bit(
    tmp_path: Path,
    forker: RankForker,
    memories: list[Path],
    calm: Callable[[str], Nodes],
    option: str,
    lost: int,
) -> None:
    # Snapshots after step 1, 6, 11, 16: twice as often where they are sent while training goes on. All die in step 20.
    often = "lose_at_most=5" if option == "looks=1" else "lose_at_most=10"
    stormy = Nodes(tmp_path / "stormy", forker, memories, often, option)
    assert stormy.generation(0, all_die(0, 20)) == [-9, -9]
    stormy.lose(lost)
    # The other node is lost before the next snapshot is due.
    assert stormy.generation(1, all_die(1, 19)) == [-9, -9]
    assert "restored step 16 from memory (of generation 0" in stormy.logged
    assert "3 steps are repeated" in stormy.logged
    stormy.lose(1 - lost)

    assert stormy.generation(2) == [0, 0], stormy.logged

    assert [stormy.began(1), stormy.began(2)] == [16, 16]
    assert "2 steps are repeated" in stormy.logged
    assert "lost" not in stormy.logged
    assert "starts over" not in stormy.logged
    assert stormy.ends == calm(option).ends


def test_a_node_lost_before_its_snapshot_has_arrived_goes_back_to_the_one_before(
    tmp_path: Path, forker: RankForker, memories: list[Path], calm: Callable[[str], Nodes]
) -> None:
    stormy = Nodes(tmp_path / "stormy", forker, memories, "lose_at_most=10", "hook=powersgd")
    # Node 0 receives nothing of node 1's snapshot of step 11. It saves step 13 when node 1 is gone.
    deaf = [f"mirror-0-{step}-0" for step in range(11, 14)]
    assert stormy.generation(0, [*deaf, "forward-0-14-1"]) == [1, -9]
    assert stormy.of("deaf")
    stormy.lose(1)

    assert stormy.generation(1) == [0, 0], stormy.logged

    assert stormy.began(1) == 6
    assert "lost" not in stormy.logged
    assert "starts over" not in stormy.logged
    assert stormy.ends == calm("hook=powersgd").ends
