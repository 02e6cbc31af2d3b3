"""Restores a group from its nodes' memories: compares what they hold, sends what is missing, and loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.memory.node_memory import NodeMemory
from elaunch.trainer.memory.recovery_plan import Decision, Held, Inventory, RecordSource
from elaunch.trainer.memory.slots import Slot, Torn, received
from elaunch.trainer.ranks.peers import Peers, neighbours
from elaunch.trainer.state.packing import unpack
from elaunch.trainer.state.region import Header
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.version import Version


class Incomplete(RuntimeError):
    """A copy from another rank is missing or damaged: this start has failed, and the next may succeed."""


def gather(node_memory: NodeMemory | None, peers: Peers, *, large: bool, pieces: Mapping[str, Held]) -> list[Inventory]:
    """The inventories of all ranks, by rank; `pieces` are this rank's share of the node's. Collective."""
    if node_memory is None:
        return peers.from_all(Inventory(peers.rank, "", speaks=False))
    return peers.from_all(node_memory.inventory(large=large, pieces=pieces))


def take_over(
    decision: Decision, inventories: list[Inventory], node_memory: NodeMemory | None, peers: Peers, training: Training
) -> None:
    """Load the decided state into the training's objects, each rank what it needs, wherever it is. Collective.

    A sharded state is loaded already: here only what each rank has for itself.
    """
    if decision.choice is None:
        _load_replicated(decision, inventories, node_memory, peers, training)

    own = _brought(decision.records, inventories, node_memory, peers)
    if own is not None:
        training.load_own(own, only_buffers=decision.records[peers.rank].of_rank != peers.rank)
    older = _brought(decision.older, inventories, node_memory, peers)
    if older is not None:
        training.load_random(older)
    drop_newer(decision.version, node_memory, peers)


def _load_replicated(
    decision: Decision, inventories: list[Inventory], node_memory: NodeMemory | None, peers: Peers, training: Training
) -> None:
    """Send the state to the ranks that lack it, and load it."""
    received = _replicated_travels(decision, inventories, node_memory, peers)
    if received is not None:
        state = unpack(*received)
    else:
        assert node_memory is not None
        header, slot = _found(node_memory, decision, inventories)
        state = slot.read(header)
    training.load_replicated(state)


def drop_newer(version: Version, node_memory: NodeMemory | None, peers: Peers) -> None:
    """Tear the copies and records of all ranks that are newer than `version`: no later start may find them."""
    if node_memory is not None and node_memory.speaks:
        node_memory.drop_newer(version)
    # Wait for all ranks before one of them stores a newer copy of this generation.
    peers.from_all(None)


def _replicated_travels(
    decision: Decision, inventories: list[Inventory], node_memory: NodeMemory | None, peers: Peers
) -> tuple[Tensor, Header] | None:
    """Send the state to the ranks that lack it, from each to the next.

    Returns it if this rank got it into its own memory, not its node's.
    """
    image, chain = None, (decision.source, *decision.receivers)
    if decision.receivers and peers.rank in chain:
        before, after = neighbours(chain, peers.rank)
        if before is None:
            assert node_memory is not None
            assert after is not None
            header, slot = _found(node_memory, decision, inventories)
            peers.send(slot.raw(header.length), after)
        elif node_memory is None or peers.rank in decision.private:
            image = _receive(peers, before, decision.version, pass_on=after)
        else:
            _receive_into(node_memory, decision.version, peers, before, after)
    if decision.receivers:
        # Other ranks of a receiver's node must not look before the state is there.
        peers.from_all(None)
    return image


def _brought(
    records: Mapping[int, RecordSource], inventories: list[Inventory], node_memory: NodeMemory | None, peers: Peers
) -> Any:
    """The state that `records` has for this rank, as views of memory; None if it has none. Collective."""
    sent = _records_travel(records, inventories, node_memory, peers)
    if sent is not None:
        return unpack(*sent)
    source = records.get(peers.rank)
    if source is None:
        return None
    assert node_memory is not None
    own = node_memory.records(source.of_rank).find(source.version)
    if own is None:
        raise Incomplete(f"rank {source.of_rank}'s own state of step {source.version.step} is gone")
    return own


def _records_travel(
    records: Mapping[int, RecordSource], inventories: list[Inventory], node_memory: NodeMemory | None, peers: Peers
) -> tuple[Tensor, Header] | None:
    """Send each record to its rank if that rank is on another node. Returns the one that this rank got."""
    image = None
    for rank, source in sorted(records.items()):
        if inventories[rank].node and inventories[rank].node == inventories[source.holder].node:
            continue
        if peers.rank == source.holder:
            assert node_memory is not None
            peers.send(_record(node_memory, source), rank)
        elif peers.rank == rank:
            image = _receive(peers, source.holder, source.version)
    return image


def _found(node_memory: NodeMemory, decision: Decision, inventories: list[Inventory]) -> tuple[Header, Slot]:
    held = inventories[decision.source].holdings
    checksum = next(holding.checksum for holding in held if holding.version == decision.version)
    found = node_memory.find(decision.version, checksum)
    if found is None:
        raise Incomplete(f"the copy of step {decision.version.step} is gone from {node_memory.folder}")
    return found


def _record(node_memory: NodeMemory, source: RecordSource) -> Tensor:
    for header, slot, _ in node_memory.records(source.of_rank).versions():
        if header.version == source.version and slot.is_intact(header):
            return slot.raw(header.length)
    step, folder = source.version.step, node_memory.folder
    raise Incomplete(f"rank {source.of_rank}'s own state of step {step} is gone from {folder}")


def _receive_into(memory: NodeMemory, version: Version, peers: Peers, source: int, pass_on: int | None) -> None:
    """Receive into a slot of this node. The slot is torn until all of it has arrived and is verified."""
    with memory.locked():
        for header, slot in memory.pair.versions():
            if header.version == version:
                slot.discard()
        slot = memory.pair.older()
        slot.discard()
        length = peers.length_from(source)
        slot.grow(length)
        peers.receive(slot.raw(length), source, pass_on=pass_on)
        try:
            slot.accept(version)
        except Torn as error:
            raise Incomplete(f"the copy that rank {source} sent is not whole: {error}") from error


def _receive(peers: Peers, source: int, expected: Version, *, pass_on: int | None = None) -> tuple[Tensor, Header]:
    region: Any = torch.empty(peers.length_from(source), dtype=torch.uint8)
    peers.receive(region, source, pass_on=pass_on)
    try:
        return region, received(region, expected)
    except Torn as error:
        raise Incomplete(f"the copy that rank {source} sent is not whole: {error}") from error
