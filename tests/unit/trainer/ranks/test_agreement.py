"""The ranks of a process group: how they find each other, and what is left when they are done."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

# Registers the backend "fake", whose collectives move nothing: the ranks need the group's store alone.
import torch.testing._internal.distributed.fake_pg  # noqa: F401

from elaunch.trainer.ranks.peers import Peers
from tests.descriptors import opened
from tests.forked import Child


def forked(folder: Path, call: Callable[[int], bool]) -> list[int]:
    """Exit codes of two forked ranks, 0 where `call` returns True. Their store is a file in `folder`."""

    def joins(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        assert call(rank)

    with ExitStack() as stack:
        children = [stack.enter_context(Child(functools.partial(joins, rank))) for rank in range(2)]
        return [child.end() for child in children]


def test_ranks_meet_whose_nodes_have_restarted_their_workers_unequally_often(tmp_path: Path) -> None:
    def meets(rank: int) -> bool:
        # torchrun counts the restarts of each node by itself.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
        return Peers().largest([rank, -rank]) == [1, 0]

    assert forked(tmp_path, meets) == [0, 0]


def test_no_socket_is_left_when_ranks_are_closed_with_those_apart(tmp_path: Path) -> None:
    def closes(rank: int) -> bool:
        open_before = opened()
        peers = Peers()
        apart = peers.apart("mirror")
        apart.meet()
        assert peers.largest([rank]) == [1]
        assert opened() - open_before

        # The other one has its answer too.
        peers.from_all(None)
        peers.close()
        return not opened() - open_before

    assert forked(tmp_path, closes) == [0, 0]
