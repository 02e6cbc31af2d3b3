"""Restores a group from its nodes' memories: compares what they hold, sends what is missing, and loads it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elaunch.trainer.memory.node_memory import NodeMemory
from elaunch.trainer.memory.recovery_plan import Decision, Inventory, RecordSource
from elaunch.trainer.memory.slots import Slot, received
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.packing import unpack
from elaunch.trainer.state.region import Header, Version
from elaunch.trainer.state.training_state import Training

Stored = Callable[[], tuple[Header, Slot]]


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
        decision, rank = self.decision, self.peers.rank
        chain = (decision.source, *decision.receivers)
        if self.memory is None or rank in decision.private or rank not in decision.receivers:
            image = self._along(chain, self._copy, decision.version)
        else:
            image = None
            self._receive_into(self.memory, chain)
        if decision.receivers:
            # Other ranks of a receiver's node must not look before the state is there.
            self.peers.from_all(None)
        return self._read(image, self._copy)

    def own(self, records: Mapping[int, RecordSource]) -> Any:
        """The state that `records` has for this rank, as views of memory; None if it has none."""
        image = None
        for rank, source in sorted(records.items()):
            node, its = self.inventories[rank].node, self.inventories[source.holder].node
            if not node or node != its:
                stored = functools.partial(self._record, source)
                image = self._along((source.holder, rank), stored, source.version) or image
        if self.peers.rank not in records:
            return None
        return self._read(image, functools.partial(self._record, records[self.peers.rank]))

    def _along(self, chain: Sequence[int], stored: Stored, version: Version) -> tuple[Tensor, Header] | None:
        """Send what is `stored` at the first of these ranks to the others. Returns what has arrived at this one."""
        region = None
        if chain[0] == self.peers.rank:
            header, slot = stored()
            region = slot.raw(header.length)
        arrived = self.peers.along(chain, region)
        return arrived and (arrived[0], received(arrived[0], version, arrived[1]))

    def _read(self, image: tuple[Tensor, Header] | None, stored: Stored) -> Any:
        if image is not None:
            return unpack(*image)
        header, slot = stored()
        return slot.read(header)

    def _copy(self) -> tuple[Header, Slot]:
        assert self.memory is not None
        version, held = self.decision.version, self.inventories[self.decision.source].holdings
        checksum = next(holding.checksum for holding in held if holding.version == version)
        found = self.memory.find(version, checksum)
        if found is None:
            raise RuntimeError(f"the copy of step {version.step} is gone from {self.memory.folder}")
        return found

    def _record(self, source: RecordSource) -> tuple[Header, Slot]:
        assert self.memory is not None
        found = self.memory.records(source.of_rank).slot_of(source.version)
        if found is None:
            raise RuntimeError(
                f"rank {source.of_rank}'s own state of step {source.version.step} is gone from {self.memory.folder}"
            )
        return found

    def _receive_into(self, memory: NodeMemory, chain: Sequence[int]) -> None:
        """Receive into a slot of this node. The slot is torn until all of it has arrived and is verified."""
        version = self.decision.version
        with memory.locked():
            for header, slot in memory.pair.versions():
                if header.version == version:
                    slot.discard()
            slot = memory.pair.older()
            slot.discard()

            def room(length: int) -> Tensor:
                slot.grow(length)
                return slot.raw(length)

            arrived = self.peers.along(chain, None, room)
            assert arrived is not None
            slot.accept(version, arrived[1])
