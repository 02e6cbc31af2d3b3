"""Copies each rank's piece of a snapshot to a second node, in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from elaunch.trainer.memory.slots import Slots, Torn
from elaunch.trainer.ranks.connections import PeerLost
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.version import Piece, Version


class Mirror:
    """Sends this rank's pieces to the next node's memory, and receives those of the node before.

    `nodes` names each rank's node; with one node there is nobody to send to. All ranks create it together, and then
    call `exchange` in the same order. `pair` returns the slots in this node's memory for a rank's pieces. `say` gets a
    sentence for each piece that has no second copy.
    """

    def __init__(
        self, peers: Peers, nodes: Sequence[str], pair: Callable[[int], Slots], say: Callable[[str], None]
    ) -> None:
        self.targets = mirrors(nodes)
        self._rank, self._world_size = peers.rank, peers.world_size
        self._target = self.targets[peers.rank]
        self._pairs = {rank: pair(rank) for rank, target in enumerate(self.targets) if target == peers.rank}
        self._peers: Peers | None = None
        if self._target is not None:
            # Connections of its own: messages of other threads must not mix with these.
            self._peers = peers.apart("mirror")
            self._peers.meet([self._target, *self._pairs])
        self._say = say
        self._thread: threading.Thread | None = None
        self._is_finished = threading.Event()
        # A sentence for each piece that has no second copy; empty if another rank says why.
        self._trouble: list[str] = []

    @property
    def is_on(self) -> bool:
        """Whether pieces are sent to another node."""
        return self._peers is not None

    def give_up(self) -> None:
        """Send and keep nothing from now on: there is no room. All ranks call it, and no exchange runs."""
        self.delete()
        if self._peers is not None:
            self._peers.close()
        self._target, self._pairs, self._peers = None, {}, None

    @property
    def has_finished(self) -> bool:
        """Whether this rank's last piece is complete."""
        return self._is_finished.is_set()

    @property
    def has_arrived(self) -> bool:
        """Whether this rank's last piece, and those sent to it, are on both nodes."""
        return not (self._thread and self._thread.is_alive()) and not self._trouble

    def has_room(self, lengths: Sequence[int], spare: Collection[Version]) -> bool:
        """Whether the next slots for other ranks' pieces have these lengths, by rank."""
        return all(pair.older(spare).size == lengths[rank] for rank, pair in self._pairs.items())

    def reserve(self, lengths: Sequence[int], spare: Collection[Version]) -> None:
        """Give the next slots for other ranks' pieces these lengths, by rank. Raises OSError without room."""
        for rank, pair in self._pairs.items():
            pair.older(spare).fit(lengths[rank])

    def delete(self) -> None:
        """Delete the slots for other ranks' pieces."""
        for pair in self._pairs.values():
            pair.delete()

    def exchange(self, finish: Callable[[], Tensor | None], version: Version, spare: Collection[Version]) -> None:
        """Begin to send what `finish` returns, and to receive other ranks' pieces of `version`.

        `finish` completes this rank's piece, in the thread; None says that there is none. The region must not change
        until the next call. A received piece does not overwrite one of a version in `spare`.
        """
        self.wait()
        self._is_finished.clear()
        # A daemon thread: a process that ends does not wait for its peers.
        self._thread = threading.Thread(target=self._run, args=(finish, version, spare), name="mirror", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Wait for the last exchange. Returns whether this rank's piece and those sent to it are whole and verified."""
        if self._thread is not None:
            self._thread.join()
        self._thread, trouble, self._trouble = None, self._trouble, []
        for sentence in trouble:
            if sentence:
                self._say(sentence)
        return not trouble

    def _run(self, finish: Callable[[], Tensor | None], version: Version, spare: Collection[Version]) -> None:
        region = None
        try:
            region = finish()
            self._is_finished.set()
        # The outermost frame of the thread. Other ranks wait for this rank's piece, so they get an empty one.
        except Exception as error:
            self._trouble.append(f"rank {self._rank}'s part of the snapshot is not whole: {_reason(error)}")
        try:
            if self._peers is not None:
                self._exchange(self._peers, region, version, spare)
        except PeerLost:
            # A rank has died, or has said why it stops.
            self._trouble.append("")
        except Exception as error:
            self._trouble.append(f"{self._lacks_copy(self._rank, _reason(error))}; no further one gets a second copy")
            # Nobody knows what the next message would be.
            if self._peers is not None:
                self._peers.close()

    def _exchange(self, peers: Peers, region: Tensor | None, version: Version, spare: Collection[Version]) -> None:
        image = torch.empty(0, dtype=torch.uint8) if region is None else region
        if self._target is not None:
            peers.begin_send(image, self._target)
        for rank, pair in self._pairs.items():
            self._receive(peers, Piece(version, self._world_size, rank), pair, spare)
        peers.flush()

    def _receive(self, peers: Peers, piece: Piece, pair: Slots, spare: Collection[Version]) -> None:
        length = peers.length_from(piece.rank)
        if not length:
            self._trouble.append("")
            return
        try:
            slot = pair.older(spare)
            slot.discard()
            slot.grow(length)
            region = slot.raw(length)
        except OSError as error:
            # The sender waits until its piece is received.
            peers.receive(torch.empty(length, dtype=torch.uint8), piece.rank)
            self._trouble.append(self._lacks_copy(piece.rank, f"rank {self._rank} cannot keep it: {error.strerror}"))
            return
        peers.receive(region, piece.rank)
        try:
            slot.accept(piece)
        except Torn as error:
            self._trouble.append(self._lacks_copy(piece.rank, f"it arrived damaged at rank {self._rank}: {error}"))

    @staticmethod
    def _lacks_copy(rank: int, why: str) -> str:
        return f"rank {rank}'s part of the snapshot is on its own node only: {why}"


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


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
