"""Two nodes with a disk each, at one path: checkpoints are right, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaunch.trainer.checkpoint import loading
from elaunch.trainer.checkpoint.checkpoints import Checkpoints, Mark, marks
from elaunch.trainer.checkpoint.storage import storage_at
from elaunch.trainer.keeper.disk_copies import DiskCopies
from elaunch.trainer.state.tree import PerRank
from tests.harness import DEADLINE_S
from tests.unit.trainer.ranks.thread_peers import ThreadPeers, thread_peers


def on_both(act: Callable[[ThreadPeers], Any]) -> list[Any]:
    """What each of two ranks returns or raises."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(act, peers) for peers in thread_peers(2)]
        return [call.exception(DEADLINE_S) or call.result(DEADLINE_S) for call in calls]


def saved(folder: Path, step: int) -> None:
    state = {"step": step, "w": torch.full((3,), float(step))}
    Checkpoints(folder, generation=0, log=pytest.fail).save(step, state)


def loaded(disks: list[Path]) -> list[Any]:
    """The step and the weights that each rank has loaded from its disk, or its error."""

    def load(peers: ThreadPeers) -> tuple[int, list[float]]:
        state: dict[str, Any] = {"w": torch.zeros(3)}
        Checkpoints(disks[peers.rank], generation=0, log=pytest.fail, group=peers).load_newest(state)
        return state["step"], state["w"].tolist()

    return on_both(load)


def test_a_replicated_state_comes_from_rank_0s_disk(tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    saved(disks[0], 5)
    # Of an earlier job, in which the other node was the first.
    saved(disks[1], 3)

    assert loaded(disks) == [(5, [5.0] * 3)] * 2


def test_a_replicated_state_goes_to_rank_0s_disk_alone(tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]

    def save(peers: ThreadPeers) -> None:
        Checkpoints(disks[peers.rank], generation=0, log=pytest.fail, group=peers).save(
            5, {"step": 5, "w": torch.ones(3)}
        )

    assert on_both(save) == [None, None]
    assert loaded(disks) == [(5, [1.0] * 3)] * 2
    assert not disks[1].exists()


@pytest.mark.parametrize(("there", "what"), [(0, "there is none"), (3, "none after step 3")])
def test_a_newer_checkpoint_on_another_nodes_disk_is_not_passed_over(tmp_path: Path, there: int, what: str) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    saved(disks[1], 5)
    if there:
        saved(disks[0], there)

    for error in loaded(disks):
        assert isinstance(error, ValueError)
        assert f"on rank 1's node has the checkpoint of step 5, and on rank 0's {what}: each node has a" in str(error)


def test_a_checkpoint_that_rank_0_sees_a_moment_later_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 5)
    seen = {rank: storage_at(tmp_path) for rank in range(2)}
    listed: list[object] = []

    def marks_of(storage: object) -> list[Mark]:
        listed.append(storage)
        return [] if listed.count(seen[0]) == 1 and storage is seen[0] else marks(tmp_path)

    monkeypatch.setattr(loading, "marks", marks_of)

    found = on_both(lambda peers: loading.find_newest(seen[peers.rank], peers))

    assert found == [(Mark(0, 5), "")] * 2


def test_a_part_of_a_sharded_state_that_rank_0_does_not_see_is_logged_and_left_nowhere(tmp_path: Path) -> None:
    disks, logged = [tmp_path / "a", tmp_path / "b"], list[str]()

    def save(peers: ThreadPeers) -> None:
        state = {"moments": PerRank({f"w{peers.rank}": {"m": torch.ones(3)}})}
        Checkpoints(disks[peers.rank], generation=0, log=logged.append, group=peers).save(5, state)

    assert on_both(save) == [None, None]

    assert "that rank has another directory of that name" in logged[0]
    assert [list(disk.iterdir()) for disk in disks] == [[], []]
    assert marks(disks[0]) == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_keeper_refuses_disks_that_a_sharded_state_cannot_share(tmp_path: Path, is_shared: bool) -> None:
    disks = [tmp_path / "a", tmp_path / ("a" if is_shared else "b")]

    def enter(peers: ThreadPeers) -> None:
        training: Any = SimpleNamespace(is_in_parts=True)
        DiskCopies(training, peers, storage_at(disks[peers.rank]), 0, pytest.fail).close()

    found = on_both(enter)

    if is_shared:
        assert found == [None, None]
    else:
        sentence = f"rank 1 has a different directory at {disks[0]} than rank 0; the checkpoints of a sharded state"
        assert sentence in str(found[0])
        assert isinstance(found[1], ValueError)
