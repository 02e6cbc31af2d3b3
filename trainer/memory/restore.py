"""Restores a group from its nodes' memories: compares what they hold, sends what is missing, and loads it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.memory.node_memory import NodeMemory
from elaunch.trainer.memory.recovery_plan import Decision, Inventory, RecordSource
from elaunch.trainer.memory.slots import Slot, Torn, received
from elaunch.trainer.ranks.peers import Peers, neighbours
from elaunch.trainer.state.packing import unpack
from elaunch.trainer.state.region import Header
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.version import Version


class Incomplete(RuntimeError):
    """A copy from another rank is missing or damaged: this start has failed, and the next may succeed."""


def gather(node_memory: NodeMemory | None, peers: Peers, *, large: bool) -> list[Inventory]:
    """The inventories of all ranks, by rank. Collective."""
    if node_memory is None:
        return peers.from_all(Inventory(peers.rank, "", speaks=False))
    return peers.from_all(node_memory.inventory(large=large))


def take_over(
    decision: Decision, inventories: list[Inventory], node_memory: NodeMemory | None, peers: Peers, training: Training
) -> None:
    """Load the decided state into the training's objects, each rank what it needs, wherever it is. Collective.

    A sharded state is loaded already: here only what each rank has for itself.
    """
    transfer = _Transfer(decision, inventories, node_memory, peers)
    if decision.choice is None:
        training.load_replicated(transfer.replicated())
    own = transfer.own(decision.records)
    if own is not None:
        training.load_own(own, only_buffers=decision.records[peers.rank].of_rank != peers.rank)
    older = transfer.own(decision.older)
    if older is not None:
        training.load_random(older, is_older=True)
    drop_newer(decision.version, node_memory, peers)


def drop_newer(version: Version, node_memory: NodeMemory | None, peers: Peers) -> None:
    """Tear the copies and records of all ranks that are newer than `version`: no later start may find them."""
    if node_memory is not None and node_memory.speaks:
        node_memory.drop_newer(version)
    # Wait for all ranks before one of them stores a newer copy of this generation.
    peers.from_all(None)


@dataclass(frozen=True)
class _Transfer:
    """How the state of `decision` comes to this rank, whose node has `memory`. All ranks call its methods."""

    decision: Decision
    inventories: list[Inventory]
    memory: NodeMemory | None
    peers: Peers

    def replicated(self) -> Any:
        """The replicated state, as views of memory. It is sent to the ranks that lack it, from each to the next."""
        decision, peers, image = self.decision, self.peers, None
        chain = (decision.source, *decision.receivers)
        if decision.receivers and peers.rank in chain:
            before, after = neighbours(chain, peers.rank)
            if before is None:
                assert after is not None
                header, slot = self._copy()
                peers.send(slot.raw(header.length), after)
            elif self.memory is None or peers.rank in decision.private:
                image = self._receive(before, decision.version, pass_on=after)
            else:
                self._receive_into(self.memory, before, after)
        if decision.receivers:
            # Other ranks of a receiver's node must not look before the state is there.
            peers.from_all(None)
        if image is not None:
            return unpack(*image)
        header, slot = self._copy()
        return slot.read(header)

    def own(self, records: Mapping[int, RecordSource]) -> Any:
        """The state that `records` has for this rank, as views of memory; None if it has none."""
        image = None
        for rank, source in sorted(records.items()):
            node, its = self.inventories[rank].node, self.inventories[source.holder].node
            if node and node == its:
                continue
            if self.peers.rank == source.holder:
                header, slot = self._record(source)
                self.peers.send(slot.raw(header.length), rank)
            elif self.peers.rank == rank:
                image = self._receive(source.holder, source.version)
        if image is not None:
            return unpack(*image)
        if self.peers.rank not in records:
            return None
        header, slot = self._record(records[self.peers.rank])
        return slot.read(header)

    def _copy(self) -> tuple[Header, Slot]:
        assert self.memory is not None
        version, held = self.decision.version, self.inventories[self.decision.source].holdings
        checksum = next(holding.checksum for holding in held if holding.version == version)
        found = self.memory.find(version, checksum)
        if found is None:
            raise Incomplete(f"the copy of step {version.step} is gone from {self.memory.folder}")
        return found

    def _record(self, source: RecordSource) -> tuple[Header, Slot]:
        assert self.memory is not None
        found = self.memory.records(source.of_rank).slot_of(source.version)
        if found is None:
            raise Incomplete(
                f"rank {source.of_rank}'s own state of step {source.version.step} is gone from {self.memory.folder}"
            )
        return found

    def _receive_into(self, memory: NodeMemory, source: int, pass_on: int | None) -> None:
        """Receive into a slot of this node. The slot is torn until all of it has arrived and is verified."""
        version = self.decision.version
        with memory.locked():
            for header, slot in memory.pair.versions():
                if header.version == version:
                    slot.discard()
            slot = memory.pair.older()
            slot.discard()
            length = self.peers.length_from(source)
            slot.grow(length)
            self.peers.receive(slot.raw(length), source, pass_on=pass_on)
            with _complete(source):
                slot.accept(version)

    def _receive(self, source: int, expected: Version, *, pass_on: int | None = None) -> tuple[Tensor, Header]:
        region: Any = torch.empty(self.peers.length_from(source), dtype=torch.uint8)
        self.peers.receive(region, source, pass_on=pass_on)
        with _complete(source):
            return region, received(region, expected)


@contextlib.contextmanager
def _complete(source: int) -> Iterator[None]:
    try:
        yield
    except Torn as error:
        raise Incomplete(f"the copy that rank {source} sent is not whole: {error}") from error
