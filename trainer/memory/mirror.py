"""Copies each rank's piece of a snapshot to a second node, in a thread, while training continues."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elaunch.trainer.files import reason
from elaunch.trainer.memory.slots import Slots
from elaunch.trainer.ranks.connections import PeerLost
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import Piece, Version


@dataclass
class _Exchange:
    """One exchange on this rank: what is wrong with its own piece, and why pieces could not be sent or kept, if so.

    `is_by_other`: `why` states only that another rank has left. `has_finished`: its own piece is whole.
    """

    damage: str = ""
    why: str = ""
    is_by_other: bool = False
    has_finished: bool = False


class Mirror:
    """Sends this rank's pieces to the next node's memory, and receives those of the node before.

    `nodes` names each rank's node; with one node there is no other to send to. All ranks create it together, and then
    call `exchange` and `settle` in the same order. `pair` returns the slots in this node's memory for a rank's pieces.
    `log` gets a sentence when all ranks give up second copies; `loss` ends it: what happens to a lost node then.
    """

    def __init__(
        self, peers: Peers, nodes: Sequence[str], pair: Callable[[int], Slots], log: Callable[[str], None], *, loss: str
    ) -> None:
        self.targets = mirrors(nodes)
        self._peers, self._log, self._loss = peers, log, loss
        self._target = self.targets[peers.rank]
        self._pairs = {rank: pair(rank) for rank, target in enumerate(self.targets) if target == peers.rank}
        self._channel: Peers | None = None
        if self._target is not None:
            # Connections of its own: messages of other threads must not mix with these.
            self._channel = peers.apart("mirror")
            self._channel.meet([self._target, *self._pairs])
        # The last exchange, and its thread until `settle` has ended it.
        self._last = _Exchange()
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether pieces are sent to another node. The same on all ranks."""
        return self._channel is not None

    def give_up(self, why: str) -> None:
        """Send and receive nothing from now on, and log `why` if it is not empty. All ranks call it. No exchange runs.

        What was received stays until the next snapshot is whole.
        """
        if why:
            self._log(
                f"rank {self._peers.rank}: there are no more second copies on other nodes ({why}); killed workers cost "
                f"no more than before, but {self._loss}"
            )
        self.close()
        self._channel = None

    def close(self) -> None:
        """Close the connections. No exchange runs on this rank."""
        if self._channel is not None:
            self._channel.close()

    @property
    def has_finished(self) -> bool:
        """Whether this rank's last piece is complete."""
        return self._last.has_finished

    @property
    def has_arrived(self) -> bool:
        """Whether this rank's last piece, and those sent to it, are on both nodes."""
        return self._thread is None or not (self._thread.is_alive() or self._last.damage or self._last.why)

    def delete(self) -> None:
        """Delete the slots for other ranks' pieces. A file that cannot be deleted stays until the job ends."""
        with contextlib.suppress(OSError):
            for pair in self._pairs.values():
                pair.delete()

    def exchange(self, finish: Callable[[], Tensor | None], version: Version, spare: Collection[Version]) -> None:
        """Begin to send what `finish` returns, and to receive other ranks' pieces of `version`, after `settle`.

        `finish` completes this rank's piece, in the thread; None where there is none. The region must not change
        until the next call. A received piece does not overwrite one of a version in `spare`.
        """
        self._last = _Exchange()
        # A daemon thread: a process that ends does not wait for its peers.
        given = (self._last, finish, version, spare)
        self._thread = threading.Thread(target=self._run, args=given, name="mirror", daemon=True)
        self._thread.start()

    def settle(self, *, is_kept: bool = True) -> bool:
        """Wait for the last exchange. Returns whether all ranks' pieces are whole, and on both nodes. Collective.

        `is_kept`: this rank has kept all that belongs to its piece. If a second copy fails, all ranks give up second
        copies together, and one of them logs why. For the next snapshots a piece on its own node is enough.
        """
        if self._thread is None:
            return True
        self._thread.join()
        last, self._thread = self._last, None
        if last.damage:
            self._log(f"rank {self._peers.rank}'s part of the snapshot is not whole: {last.damage}")
        # Logged by the lowest rank, if possible by one whose reason is not that another rank has left.
        world_size = self._peers.world_size
        order = world_size - self._peers.rank + world_size * (not last.is_by_other) if last.why else 0
        is_torn, highest = self._peers.all_reduce_max([not is_kept or bool(last.damage), order])
        if highest:
            self.give_up(last.why if order == highest else "")
        is_whole = not (is_torn or highest)
        if is_whole and not self.is_on:
            self.delete()
            self._pairs = {}
        return is_whole

    def _run(
        self, exchange: _Exchange, finish: Callable[[], Tensor | None], version: Version, spare: Collection[Version]
    ) -> None:
        region = None
        try:
            region = finish()
            exchange.has_finished = True
        # The outermost frame of the thread. Other ranks wait for this rank's piece, so they get an empty one.
        except Exception as error:
            exchange.damage = reason(error)
        if self._channel is None:
            return
        try:
            if self._target is not None:
                self._channel.begin_send(torch.empty(0, dtype=torch.uint8) if region is None else region, self._target)
            for rank, pair in self._pairs.items():
                self._receive(self._channel, Piece(version, self._peers.world_size, rank), pair, spare)
            self._channel.flush()
        except Exception as error:
            # The sender must not wait.
            self._channel.close()
            exchange.why, exchange.is_by_other = reason(error), isinstance(error, PeerLost)

    def _receive(self, channel: Peers, piece: Piece, pair: Slots, spare: Collection[Version]) -> None:
        """Receive a piece, if that rank has one. Raises Torn if it arrives damaged, and OSError without room."""
        length = channel.length_from(piece.rank)
        if length:
            slot = pair.older(spare)
            slot.discard()
            slot.grow(length)
            channel.receive(slot.raw(length), piece.rank)
            slot.accept(piece, piece.rank)


def mirrors(nodes: Sequence[str]) -> list[int | None]:
    """For each rank the rank on the next node that keeps a second copy of its piece; None if there is only one node.

    `nodes` names each rank's node. The nodes are a ring, in the order of their lowest ranks.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    found: list[int | None] = [None] * len(nodes)
    ring = list(ranks_of.values())
    for ranks, peers in zip(ring, ring[1:] + ring[:1], strict=True):
        if ranks is not peers:
            for place, rank in enumerate(ranks):
                found[rank] = peers[place % len(peers)]
    return found
