"""Collectives over the ranks' own connections: right on all ranks, or an error on all ranks."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# Registers the backend "fake", whose collectives move nothing: the ranks need the group's store alone.
import torch.testing._internal.distributed.fake_pg
from torch import Tensor

from elaunch.agent.diagnosis.exit_status import TIMED_OUT, shows_only_lost_peer
from elaunch.trainer.ranks.connections import PeerLost
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.region import MARK
from tests.descriptors import opened
from tests.forked import Child
from tests.harness import DEADLINE_S
from tests.unit.trainer.ranks.thread_peers import ThreadPeers, begin, on_all, thread_peers

# Several times what the kernel takes of a connection at once.
REGION_BYTES = 6 << 20


def pattern(seed: int, length: int = REGION_BYTES) -> Tensor:
    content = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    # The mark is not sent.
    content[: len(MARK)] = 0
    return content


@pytest.mark.parametrize("world_size", [2, 64])
def test_collectives_are_right_on_all_ranks(world_size: int) -> None:
    ranks = range(world_size)

    def all_of_them(peers: ThreadPeers) -> list[object]:
        rank, region = peers.rank, torch.zeros(999)
        found: list[object] = [
            peers.all_reduce_max([rank, -rank, 5]),
            peers.all_gather("x" * rank),
            peers.broadcast("hello" if not rank else None),
            peers.gather(rank),
            peers.all_reduce_max([]),
        ]
        peers.broadcast_tensors([region + 7 if not rank else region])
        return [*found, float(region.sum())]

    found = on_all(thread_peers(world_size), all_of_them)

    for rank, (largest, gathered, sent, collected, none, total) in enumerate(found):
        assert largest == [world_size - 1, 0, 5]
        assert gathered == ["x" * each for each in ranks]
        assert sent == "hello"
        assert collected == (None if rank else [*ranks])
        assert none == []
        assert total == (7 * 999 if rank else 0)


@pytest.mark.parametrize("chain", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3]])
def test_a_region_goes_along_a_chain_bit_for_bit(chain: list[int]) -> None:
    def pass_on(peers: ThreadPeers) -> tuple[Tensor, int] | None:
        found = peers.relay(chain, pattern(1))
        if found:
            found[0][: len(MARK)] = 0
        return found

    found = on_all(thread_peers(4), pass_on)

    for before, rank in pairwise(chain):
        region, sender = found[rank] or (torch.empty(0), -1)
        assert torch.equal(region, pattern(1))
        assert sender == before
    assert sum(each is None for each in found) == 5 - len(chain)


@pytest.mark.parametrize("step", [1, 2])
def test_ranks_in_a_ring_send_to_each_other_at_the_same_time(step: int) -> None:
    def exchange(peers: ThreadPeers) -> bool:
        before, after = (peers.rank - step) % 3, (peers.rank + step) % 3
        mine = pattern(peers.rank)
        peers.meet([before, after])
        peers.begin_send(mine, after)
        region = torch.zeros(peers.length_from(before), dtype=torch.uint8)
        peers.receive(region, before)
        peers.flush()
        return torch.equal(region, pattern(before))

    assert on_all(thread_peers(3), exchange) == [True] * 3


COLLECTIVES: dict[str, Callable[[Peers], object]] = {
    "all_reduce_max": lambda peers: peers.all_reduce_max([peers.rank]),
    "all_gather": lambda peers: peers.all_gather(peers.rank),
    "gather": lambda peers: peers.gather(peers.rank),
    "broadcast": lambda peers: peers.broadcast("word"),
    "broadcast_tensors": lambda peers: peers.broadcast_tensors([torch.zeros(REGION_BYTES // 4)]),
}


def until_lost(call: Callable[[], object]) -> str:
    """Call it until it fails, as a training does. Returns why."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        try:
            call()
        except PeerLost as error:
            return str(error)
    return ""


# The root, and one with ranks below it.
@pytest.mark.parametrize("dead", [0, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_dies_is_an_error_on_all_ranks(collective: str, dead: int) -> None:
    call = COLLECTIVES[collective]

    def lives(peers: ThreadPeers) -> str:
        call(peers)
        if peers.rank == dead:
            # The kernel does this for a process that is killed.
            peers.close()
            return "dead"
        return until_lost(lambda: call(peers))

    found = on_all(thread_peers(11), lives)

    assert all(found), found
    # Whichever of two that a rank waits for is gone.
    assert all("connection closed by peer" in why for rank, why in enumerate(found) if rank != dead), found


def test_a_rank_that_waits_is_notified_immediately_of_the_death_of_one_that_waits_for_it() -> None:
    ranks = thread_peers(3)
    on_all(ranks, lambda peers: peers.all_reduce_max([peers.rank]))

    # Rank 1 has sent its number and dies. Rank 2 has not come yet, and rank 0 waits for it.
    with ThreadPoolExecutor(2) as pool:
        root, child = begin(pool, ranks[:2], lambda peers: peers.all_reduce_max([peers.rank]))
        assert not child.done()
        ranks[1].connections._connected[0].shutdown(2)

        with pytest.raises(PeerLost, match="rank 1 is gone"):
            root.result(DEADLINE_S)
        with pytest.raises(PeerLost) as lost:
            child.result(DEADLINE_S)
    # The agent folds it: no error of the program's own is in the chain.
    assert shows_only_lost_peer("".join(traceback.format_exception(lost.value)))


def test_a_rank_that_does_nothing_is_an_error_after_the_timeout() -> None:
    ranks = thread_peers(2)
    on_all(ranks, lambda peers: peers.all_reduce_max([peers.rank]))
    # They have met by now, however long that took.
    ranks[0].connections._timeout_s = 0.05

    with pytest.raises(PeerLost, match=r"collective operation timeout: waited 0.05 s for rank 1") as raised:
        ranks[0].all_reduce_max([0])
    # The text by which the agent finds the rank that did not come.
    assert re.search(TIMED_OUT, str(raised.value), re.IGNORECASE)
    with pytest.raises(PeerLost, match="is closed: collective operation timeout"):
        ranks[0].all_reduce_max([0])


def test_ranks_that_call_different_collectives_get_an_error() -> None:
    calls: list[Callable[[Peers], object]] = [
        lambda peers: peers.all_reduce_max([0]),
        lambda peers: peers.all_gather("long"),
    ]

    with ThreadPoolExecutor(2) as pool:
        found = begin(pool, thread_peers(2), lambda peers: calls[peers.rank](peers))

        with pytest.raises(PeerLost, match=r"rank 1 has sent GATHER of \d+, and this rank waits for MAX;"):
            found[0].result(DEADLINE_S)
        with pytest.raises(PeerLost):
            found[1].result(DEADLINE_S)


def test_a_child_that_a_rank_has_forked_keeps_no_connection_open() -> None:
    ranks = thread_peers(2)
    on_all(ranks, lambda peers: peers.all_reduce_max([peers.rank]))
    with Child(signal.pause) as child:
        ranks[1].close()

        with pytest.raises(PeerLost, match="rank 1 is gone"):
            ranks[0].all_reduce_max([0])
        assert child.code is None


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
        return Peers().all_reduce_max([rank, -rank]) == [1, 0]

    assert forked(tmp_path, meets) == [0, 0]


def test_no_socket_is_left_when_ranks_are_closed_with_those_apart(tmp_path: Path) -> None:
    def closes(rank: int) -> bool:
        open_before = opened()
        peers = Peers()
        apart = peers.apart("mirror")
        apart.meet()
        assert peers.all_reduce_max([rank]) == [1]
        assert opened() - open_before

        # The other one has its result too.
        peers.all_gather(None)
        peers.close()
        return not opened() - open_before

    assert forked(tmp_path, closes) == [0, 0]
