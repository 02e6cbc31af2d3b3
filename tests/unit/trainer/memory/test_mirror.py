"""Where the second copy of each rank's piece goes, and what becomes of second copies that fail.

The ranks are threads of the test, each on a node of its own; the connections between them are real.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elaunch.trainer.memory.mirror import Mirror, mirrors
from elaunch.trainer.memory.slots import Slot, Slots
from elaunch.trainer.state import Piece, Version
from elaunch.trainer.state.packing import pack
from tests.unit.trainer.ranks.thread_peers import Book, ThreadPeers, on_all


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("aa", [None, None]),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abb", [1, 0, 0]),
        ("abab", [1, 0, 3, 2]),
    ],
)
def test_the_second_copy_is_on_the_next_node(nodes: str, expected: list[int | None]) -> None:
    found = mirrors(list(nodes))

    assert found == expected
    assert all(mirror is None or nodes[mirror] != nodes[rank] for rank, mirror in enumerate(found))


class FailingSlots(Slots):
    """Slots for which there is no memory the first `fails` times, as torch reports it."""

    fails = 0

    def older(self, spare: Collection[Version] = ()) -> Slot:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("can't allocate memory")
        return super().older(spare)


class Rank:
    """One rank on a node of its own, whose memory is `folder`."""

    def __init__(self, rank: int, books: dict[str, Book], folder: Path) -> None:
        self.rank, self.folder, self.logged = rank, folder, list[str]()
        self.own = Slots(folder / f"piece-{rank}", bytes(16))
        self.of_other: FailingSlots
        peers = ThreadPeers(rank, 2, books)
        self.mirror = Mirror(peers, ["a", "b"], self.slots_of, self.logged.append, loss="a lost node is lost")

    def slots_of(self, rank: int) -> FailingSlots:
        self.of_other = FailingSlots(self.folder / f"mirrored-{rank}", bytes(16))
        return self.of_other

    def snapshot(self, step: int) -> bool:
        """Whether it is whole, for all ranks."""
        version = Version(0, step)

        def finish() -> Tensor:
            slot = self.own.older()
            return slot.raw(slot.write(Piece(version, 2, self.rank), pack({"x": torch.ones(500_000)})).length)

        self.mirror.exchange(finish, version, ())
        return self.mirror.settle()


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    books = {"ranks": Book(), "mirror": Book()}
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return on_all([0, 1], lambda rank: Rank(rank, books, folders[rank]))


def newest_of_other(rank: Rank) -> Version:
    header, _ = rank.of_other.versions()[0]
    return header.version


def test_a_snapshot_is_on_both_nodes(ranks: list[Rank]) -> None:
    assert on_all(ranks, lambda rank: rank.snapshot(1)) == [True, True]

    assert [newest_of_other(rank) for rank in ranks] == [Version(0, 1)] * 2
    assert [rank.logged for rank in ranks] == [[], []]


def test_a_failure_ends_second_copies_on_all_ranks_and_one_logs_it(ranks: list[Rank]) -> None:
    ranks[1].of_other.fails = 1

    assert on_all(ranks, lambda rank: rank.snapshot(1)) == [False, False]
    # From now on a piece on its own node is enough.
    assert on_all(ranks, lambda rank: rank.snapshot(2)) == [True, True]

    assert [rank.mirror.is_on for rank in ranks] == [False, False]
    assert ranks[0].logged == []
    assert ranks[1].logged == [
        "rank 1: there are no more second copies on other nodes (can't allocate memory); killed workers cost no more "
        "than before, but a lost node is lost"
    ]


def test_a_rank_that_loses_its_connection_to_the_other_node_any_more_ends_second_copies_on_all_and_one_logs_why(
    ranks: list[Rank],
) -> None:
    assert on_all(ranks, lambda rank: rank.snapshot(1)) == [True, True]
    ranks[0].mirror.close()

    assert on_all(ranks, lambda rank: rank.snapshot(2)) == [False, False]
    # What had arrived stays until another snapshot is whole, and then takes no memory any more.
    assert newest_of_other(ranks[0]) == Version(0, 1)
    assert on_all(ranks, lambda rank: rank.snapshot(3)) == [True, True]

    assert [rank.mirror.is_on for rank in ranks] == [False, False]
    assert [list(rank.folder.glob("mirrored-*")) for rank in ranks] == [[], []]
    (logged,) = ranks[0].logged
    assert logged.startswith("rank 0: there are no more second copies on other nodes (")
    assert ranks[1].logged == []
