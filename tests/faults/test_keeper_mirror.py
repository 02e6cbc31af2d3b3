"""State that only one rank has is also in the memory of a second node: after a lost node training ends bit for bit."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.faults.keeper_runs import KEPT, Recorded
from tests.harness import slow, wait_for
from tests.ranks import RankForker, Ranks

STEPS = 24


@pytest.fixture
def memories() -> Iterator[list[Path]]:
    """One folder in shared memory for each of two nodes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        yield [Path(one), Path(other)]


class Nodes(Recorded):
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
        self.said = "".join(rank.err for rank in ended)
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
            assert calm.generation(0) == [0, 0], calm.said
            return calm

    return run


def all_die(generation: int, step: int) -> list[str]:
    """Both ranks die at once in that step. What they have sent has arrived by then."""
    return [f"{what}-{generation}-{step}-{rank}" for what in ("settle", "together") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("option", "lost"),
    [("hook=powersgd", 1), slow("looks=1", 0), slow("shards=fsdp2", 1), slow("hook=powersgd", 0)],
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
    assert "restored step 16 from memory (of generation 0" in stormy.said
    assert "3 steps are repeated" in stormy.said
    stormy.lose(1 - lost)

    assert stormy.generation(2) == [0, 0], stormy.said

    assert [stormy.began(1), stormy.began(2)] == [16, 16]
    assert "2 steps are repeated" in stormy.said
    assert "lost" not in stormy.said
    assert "anew" not in stormy.said
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

    assert stormy.generation(1) == [0, 0], stormy.said

    assert stormy.began(1) == 6
    assert "lost" not in stormy.said
    assert "anew" not in stormy.said
    assert stormy.ends == calm("hook=powersgd").ends


def test_a_node_lost_after_its_snapshot_has_arrived_goes_back_to_that_one(
    tmp_path: Path, forker: RankForker, memories: list[Path], calm: Callable[[str], Nodes]
) -> None:
    options = ("lose_at_most=1", "snapshot_every=5", "hook=powersgd")
    stormy = Nodes(tmp_path / "stormy", forker, memories, *options)
    with stormy.begun(0, ["hold-0-12-0", "forward-0-14-1"]) as ranks:
        # Each node has the other's part of the snapshot of step 11.
        wait_for(lambda: all(steps_of(memories[1 - rank], rank) >= {11} for rank in (0, 1)), "the snapshot")
        (stormy.folder / "hold-0-12-0").unlink()
        assert stormy.ends_of(ranks) == [1, -9]
    stormy.lose(1)

    assert stormy.generation(1) == [0, 0], stormy.said

    # Node 0 has saved step 13, whose copy node 1 had on its own memory alone.
    assert stormy.began(1) == 11
    assert "2 steps are repeated" in stormy.said
    assert stormy.ends == calm("hook=powersgd").ends


def steps_of(memory: Path, rank: int) -> set[int]:
    """The steps of the snapshots of that rank's own state in a node's memory."""
    files = [path.read_bytes() for path in memory.glob(f"training.rank-{rank}-[23]")]
    # The mark, which is written last, and the step (trainer/state/region.py, which imports torch).
    return {int.from_bytes(content[32:40], "little") for content in files if any(content[:8])}


def test_records_are_kept_as_long_as_the_parts_that_they_belong_to(
    tmp_path: Path, forker: RankForker, memories: list[Path]
) -> None:
    options = ("lose_at_most=10", "shards=zero", f"checkpoints={tmp_path / 'checkpoints'}")
    stormy = Nodes(tmp_path / "stormy", forker, memories, *options)
    # The snapshot of step 11 reaches no second node.
    deaf = [f"mirror-0-{step}-{rank}" for step in range(11, 16) for rank in (0, 1)]
    assert stormy.generation(0, [*deaf, "together-0-15-0", "together-0-15-1"]) == [-9, -9]
    assert stormy.of("deaf")
    stormy.lose(1)

    assert stormy.generation(1) == [0, 0], stormy.said

    assert stormy.began(1) == 6
    assert "lost" not in stormy.said
    # A Keeper that was left has closed the connections of its threads too: of snapshots, pieces and the checkpoint.
    assert [each["sockets"] for each in stormy.of("left")] == [0, 0]


def test_what_cannot_be_kept_for_another_node_keeps_nobody_waiting(
    tmp_path: Path, forker: RankForker, memories: list[Path]
) -> None:
    run = Nodes(tmp_path / "run", forker, memories, "lose_at_most=5")
    with run.begun(0, ["hold-0-4-0"]) as ranks:
        wait_for(lambda: run.of("held"), "step 4")
        # A folder blocks the path to which rank 0's second snapshot would go.
        (memories[1] / "training.rank-0-3").mkdir()
        (run.folder / "hold-0-4-0").unlink()

        assert run.ends_of(ranks) == [0, 0], run.said

    # All ranks give up, and one says so.
    assert run.said.count("there are no more second copies on other nodes (Is a directory") == 1


@pytest.mark.slow
def test_pieces_of_each_step_stay_on_their_nodes_and_the_snapshot_counts_when_one_is_lost(
    tmp_path: Path, forker: RankForker, memories: list[Path], calm: Callable[[str], Nodes]
) -> None:
    stormy = Nodes(tmp_path / "stormy", forker, memories, "lose_at_most=1", "snapshot_every=5", "shards=fsdp2")
    # Both nodes have their pieces of step 19. The last snapshot is of step 16.
    assert stormy.generation(0, all_die(0, 20)) == [-9, -9]
    # There is a snapshot at the start, and the next would be after step 24.
    assert stormy.generation(1, all_die(1, 24)) == [-9, -9]
    stormy.lose(1)

    assert stormy.generation(2) == [0, 0], stormy.said

    assert [stormy.began(1), stormy.began(2)] == [19, 19]
    assert stormy.ends == calm("shards=fsdp2").ends
