"""The start of a group: what the nodes' memories hold is compared, travels where it is missing, and is taken over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.memory.recovery_plan import Decision, Inventory, RecordSource, decide, sources
from elaunch.trainer.memory.replicated import (
    Records,
    ReplicatedMemory,
    Slot,
    completed_in,
    records_in,
    verified_records_in,
)
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.packing import Header, header_of, is_intact, unpack
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.version import Version


class Incomplete(RuntimeError):
    """What another rank sent did not arrive as it was: this start has failed, and the next may do better."""


@dataclass(frozen=True)
class NodeMemory:
    """This node's memory for one training.

    `speaks` is true of one rank a node, which lists and fills the memory for all. `say` is told what was found torn.
    """

    memory: ReplicatedMemory
    name: str
    layout: bytes
    speaks: bool
    say: Callable[[str], None]

    def records(self, rank: int) -> Records:
        return Records(self.memory.folder, self.name, self.layout, rank)

    def inventory(self, rank: int, *, large: bool) -> Inventory:
        """What is in this memory, verified; called by all ranks of the node."""
        if not self.speaks:
            return Inventory(rank, self.memory.node, speaks=False)
        holdings = self.memory.verified(all_of_them=large, say=self.say)
        records = verified_records_in(self.memory.folder, self.name, self.layout)
        return Inventory(
            rank, self.memory.node, True, tuple(holdings), tuple(records), self.completed(), self.memory.free
        )

    def completed(self) -> Version | None:
        """The newest step that any worker of this node has completed, those that are dead included."""
        return completed_in(self.memory.folder, self.name, self.layout)


def agree(shelf: NodeMemory | None, peers: Peers, *, large: bool) -> tuple[Decision | None, list[Inventory]]:
    """What all ranks go on from; None where no memory has anything. Collective."""
    inventories = _inventories(shelf, peers, large=large)
    return decide(inventories, large=large), inventories


def take_over(
    decision: Decision, inventories: list[Inventory], shelf: NodeMemory | None, peers: Peers, training: Training
) -> None:
    """Bring the decided state to whoever lacks it, and put it into the training's objects. Collective."""
    received = _replicated_travels(decision, inventories, shelf, peers)
    if received is not None:
        state = unpack(*received)
    else:
        assert shelf is not None
        header, slot = _found(shelf, decision, inventories)
        state = slot.read(header)
    training.load_replicated(state)

    own = _brought(decision.records, inventories, shelf, peers)
    if own is not None:
        training.load_own(own, only_buffers=decision.records[peers.rank].of_rank != peers.rank)
    older = _brought(decision.older, inventories, shelf, peers)
    if older is not None:
        training.load_random(older)
    _drop_newer(decision.version, shelf, peers)


def restore_own(version: Version, shelf: NodeMemory, peers: Peers, training: Training) -> bool:
    """Put this rank's record of `version` into the objects, from whichever node has it: whether one has. Collective."""
    inventories = _inventories(shelf, peers, large=False)
    records = {rank: its for rank, its in sources(inventories, version).items() if its.of_rank == rank}
    own = _brought(records, inventories, shelf, peers)
    if own is not None:
        training.load_own(own)
    _drop_newer(version, shelf, peers)
    return own is not None


def _drop_newer(version: Version, shelf: NodeMemory | None, peers: Peers) -> None:
    """Have what is given up torn, of all ranks: it must not be found the next time, nor outlive what counts."""
    if shelf is not None and shelf.speaks:
        for records in records_in(shelf.memory.folder, shelf.name, shelf.layout):
            records.drop_newer(version)
        shelf.memory.drop_newer(version)
    # Before anybody has a newer one of this generation.
    peers.from_all(None)


def _inventories(shelf: NodeMemory | None, peers: Peers, *, large: bool) -> list[Inventory]:
    """By rank what its node's memory has."""
    mine = Inventory(peers.rank, "", speaks=False) if shelf is None else shelf.inventory(peers.rank, large=large)
    return peers.from_all(mine)


def _replicated_travels(
    decision: Decision, inventories: list[Inventory], shelf: NodeMemory | None, peers: Peers
) -> tuple[Tensor, Header] | None:
    """Send the state to whoever lacks it: into its node's memory; without one, into its own, which is returned."""
    image = None
    for receiver in decision.receivers:
        if peers.rank == decision.source:
            assert shelf is not None
            header, slot = _found(shelf, decision, inventories)
            peers.send(slot.raw(header.length), receiver)
        elif peers.rank == receiver:
            if shelf is None or receiver in decision.private:
                image = _receive(peers, decision.source)
            else:
                _receive_into(shelf.memory, decision, peers)
    if decision.receivers:
        # The others of a receiver's node must not look before it is there.
        peers.from_all(None)
    return image


def _brought(
    records: Mapping[int, RecordSource], inventories: list[Inventory], shelf: NodeMemory | None, peers: Peers
) -> Any:
    """The state that `records` has for this rank, as views of memory; None where it has none. Collective."""
    sent = _records_travel(records, inventories, shelf, peers)
    if sent is not None:
        return unpack(*sent)
    source = records.get(peers.rank)
    if source is None:
        return None
    assert shelf is not None
    own = shelf.records(source.of_rank).find(source.version)
    if own is None:
        raise Incomplete(f"rank {source.of_rank}'s own state of step {source.version.step} is gone")
    return own


def _records_travel(
    records: Mapping[int, RecordSource], inventories: list[Inventory], shelf: NodeMemory | None, peers: Peers
) -> tuple[Tensor, Header] | None:
    """Send the ranks' own states that lie in another node's memory than their rank; what this rank got."""
    image = None
    for rank, source in sorted(records.items()):
        if inventories[rank].node and inventories[rank].node == inventories[source.holder].node:
            continue
        if peers.rank == source.holder:
            assert shelf is not None
            found = _record(shelf, source)
            if rank == peers.rank:
                image = found
            else:
                peers.send(found[0], rank)
        elif peers.rank == rank:
            image = _receive(peers, source.holder)
    return image


def _found(shelf: NodeMemory, decision: Decision, inventories: list[Inventory]) -> tuple[Header, Slot]:
    held = inventories[decision.source].holdings
    checksum = next(holding.checksum for holding in held if holding.version == decision.version)
    found = shelf.memory.find(decision.version, checksum)
    if found is None:
        raise Incomplete(f"the copy of step {decision.version.step} is gone from {shelf.memory.folder}")
    return found


def _record(shelf: NodeMemory, source: RecordSource) -> tuple[Tensor, Header]:
    for header, slot, _ in shelf.records(source.of_rank).versions():
        if header.version == source.version and slot.is_intact(header):
            return slot.raw(header.length), header
    step, folder = source.version.step, shelf.memory.folder
    raise Incomplete(f"rank {source.of_rank}'s own state of step {step} is gone from {folder}")


def _receive_into(memory: ReplicatedMemory, decision: Decision, peers: Peers) -> None:
    """Receive into a slot of this node; it is torn until all is there and has proved to be whole."""
    with memory.locked():
        for header, slot in memory.pair.versions():
            if header.version == decision.version:
                slot.discard()
        slot = memory.pair.older()
        slot.discard()
        length = peers.length_from(decision.source)
        slot.grow(length)
        peers.receive(slot.raw(length), decision.source)
        if slot.accept() is None:
            raise Incomplete(f"the copy that rank {decision.source} sent does not have its checksum")


def _receive(peers: Peers, source: int) -> tuple[Tensor, Header]:
    region: Any = torch.empty(peers.length_from(source), dtype=torch.uint8)
    peers.receive(region, source)
    header = header_of(region, marked=False)
    if header is None or not is_intact(region, header):
        raise Incomplete(f"the copy that rank {source} sent does not have its checksum")
    return region, header
