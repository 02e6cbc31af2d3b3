"""Collectives over the ranks' own connections: right on all ranks, or an error on all ranks."""

from __future__ import annotations

import random
import re
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from elaunch.agent.diagnosis.exit_status import tells_of_lost_peer
from elaunch.agent.peer_lost import TIMED_OUT
from elaunch.trainer.ranks.channel import Channel
from elaunch.trainer.ranks.connections import PeerLost
from tests.forked import Child
from tests.harness import DEADLINE_S
from tests.unit.trainer.ranks.channels import begin, channels, on_all

# Several times what the kernel takes of a connection at once.
REGION_BYTES = 6 << 20


def pattern(seed: int, length: int = REGION_BYTES) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.mark.parametrize("world_size", [2, 64])
def test_collectives_are_right_on_all_ranks(world_size: int) -> None:
    ranks = range(world_size)

    def all_of_them(channel: Channel, rank: int) -> list[object]:
        found: list[object] = [
            channel.largest([rank, -rank, 5]),
            channel.all_gather(b"x" * rank),
            bytes(channel.broadcast(b"hello" if not rank else None)),
            channel.gather(b"%d" % rank),
            channel.scatter([b"for %d" % each for each in ranks] if not rank else None),
            channel.largest([]),
        ]
        region = bytearray(pattern(0, 999) if not rank else bytes(999))
        channel.pass_down(memoryview(region))
        return [*found, bytes(region)]

    found = on_all(channels(world_size), all_of_them)

    for rank, (largest, gathered, told, collected, mine, none, region) in enumerate(found):
        assert largest == [world_size - 1, 0, 5]
        assert gathered == [b"x" * each for each in ranks]
        assert told == b"hello"
        assert collected == (None if rank else [b"%d" % each for each in ranks])
        assert mine == b"for %d" % rank
        assert none == []
        assert region == pattern(0, 999)


@pytest.mark.parametrize("chain", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3]])
def test_a_region_goes_along_a_chain_bit_for_bit(chain: list[int]) -> None:
    def pass_on(channel: Channel, rank: int) -> bytes:
        if rank not in chain:
            return b""
        place = chain.index(rank)
        if not place:
            channel.begin_send(chain[1], memoryview(pattern(1)))
            channel.flush()
            return pattern(1)
        region = bytearray(channel.length_from(chain[place - 1]))
        following = chain[place + 1] if place + 1 < len(chain) else None
        channel.receive_into(memoryview(region), chain[place - 1], pass_on=following)
        return bytes(region)

    found = on_all(channels(4), pass_on)

    assert all(found[rank] == pattern(1) for rank in chain)


@pytest.mark.parametrize("step", [1, 2])
def test_ranks_in_a_ring_send_to_each_other_at_the_same_time(step: int) -> None:
    def exchange(channel: Channel, rank: int) -> bool:
        before, after = (rank - step) % 3, (rank + step) % 3
        mine = pattern(rank)
        channel.meet([before, after])
        channel.begin_send(after, memoryview(mine))
        region = bytearray(channel.length_from(before))
        channel.receive_into(memoryview(region), before)
        channel.flush()
        return region == pattern(before)

    assert on_all(channels(3), exchange) == [True] * 3


COLLECTIVES: dict[str, Callable[[Channel, int], object]] = {
    "largest": lambda channel, rank: channel.largest([rank]),
    "all_gather": lambda channel, rank: channel.all_gather(b"%d" % rank),
    # A leaf that only sends would be far ahead of rank 0.
    "gather": lambda channel, rank: (channel.gather(b"%d" % rank), channel.largest([])),
    "broadcast": lambda channel, rank: channel.broadcast(b"word"),
    "scatter": lambda channel, rank: channel.scatter([b"word"] * 11),
    "pass_down": lambda channel, rank: channel.pass_down(memoryview(bytearray(REGION_BYTES))),
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


# The root, a leaf of the root, one with leaves below it, and one of those.
@pytest.mark.parametrize("dead", [0, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_dies_is_an_error_on_all_ranks(collective: str, dead: int) -> None:
    call = COLLECTIVES[collective]

    def lives(channel: Channel, rank: int) -> str:
        call(channel, rank)
        if rank == dead:
            # The kernel does this for a process that is killed.
            channel.close()
            return "dead"
        return until_lost(lambda: call(channel, rank))

    found = on_all(channels(11), lives)

    assert all(found), found
    # Whichever of two that a rank waits for is gone.
    assert all("connection closed by peer" in why for rank, why in enumerate(found) if rank != dead), found


def test_a_rank_that_waits_hears_at_once_of_the_death_of_one_that_waits_for_it() -> None:
    ranks = channels(3)
    on_all(ranks, lambda channel, rank: channel.largest([rank]))

    # Rank 1 has said its number and dies. Rank 2 has not come yet, and rank 0 waits for it.
    with ThreadPoolExecutor(2) as pool:
        root, child = begin(pool, ranks[:2], lambda channel, rank: channel.largest([rank]))
        assert not child.done()
        ranks[1]._connections._connected[0].socket.shutdown(2)

        with pytest.raises(PeerLost, match="rank 1 is gone"):
            root.result(DEADLINE_S)
        with pytest.raises(PeerLost) as lost:
            child.result(DEADLINE_S)
    # The agent folds it: no error of the program's own is in the chain.
    assert tells_of_lost_peer("".join(traceback.format_exception(lost.value)))


def test_a_rank_that_does_nothing_is_an_error_after_the_timeout() -> None:
    ranks = channels(2)
    on_all(ranks, lambda channel, rank: channel.largest([rank]))
    # They have met by now, however long that took.
    ranks[0]._connections._timeout_s = 0.05

    with pytest.raises(PeerLost, match=r"collective operation timeout: waited 0.05 s for rank 1") as raised:
        ranks[0].largest([0])
    # The words by which the agent looks for the rank that did not come.
    assert re.search(TIMED_OUT, str(raised.value), re.IGNORECASE)
    with pytest.raises(PeerLost, match="is over: collective operation timeout"):
        ranks[0].largest([0])


def test_ranks_that_call_different_collectives_get_an_error() -> None:
    calls = [lambda channel: channel.largest([0]), lambda channel: channel.all_gather(b"a longer one than a number")]

    with ThreadPoolExecutor(2) as pool:
        found = begin(pool, channels(2), lambda channel, rank: calls[rank](channel))

        with pytest.raises(
            PeerLost,
            match="rank 1 has sent COLLECTED of 34, and this rank waits for LARGEST of 8",
        ):
            found[0].result(DEADLINE_S)
        with pytest.raises(PeerLost):
            found[1].result(DEADLINE_S)


def test_a_child_that_a_rank_has_forked_keeps_no_connection_open() -> None:
    ranks = channels(2)
    on_all(ranks, lambda channel, rank: channel.largest([rank]))
    with Child(signal.pause) as child:
        ranks[1].close()

        with pytest.raises(PeerLost, match="rank 1 is gone"):
            ranks[0].largest([0])
        assert child.code is None
