"""Snapshots of a sharded state in the memory of the nodes. Two nodes hold each part.

    memory = ShardedMemory(folder, log=log, generation=generation)
    found = restore(memory.load, model, optimizer, rest)   # its Version, or None if nothing is complete
    memory.save(step, {**rest, **state_of(model, optimizer)})   # every k steps

All ranks call all of these, in the same order. Each rank copies its piece of the state to a file in `folder`, which
belongs to the node and outlives the workers; a thread then sends the piece to the next node. Tensors that all ranks
have are in one piece per node. Two versions are kept, since a failure may happen before every rank has the newer one.
The older is overwritten only when all ranks agree that the newer is whole on both nodes. So neither a lost node nor any
number of lost workers loses a snapshot. At the next start the ranks assemble what the nodes hold, send each other what
a node lacks, and cut it to the new world size.

With `copy` each rank keeps its piece of a step on its own node only. This takes so little time that it can be done at
each step. Then a dead worker's piece of the last step is still there. With one node copies and snapshots share the two
slots; with several nodes copies have two of their own, since snapshots are sent.

A node holds twice the pieces of its own ranks, with several nodes twice more for copies, and twice the pieces of the
node before it:

    piece-R-0, piece-R-1   rank R's piece, of two versions
    piece-R-2, piece-R-3   with several nodes: its copies, of two versions
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.memory import pieces
from elaunch.trainer.memory.device_copy import copy_from_devices
from elaunch.trainer.memory.mirror import Mirror
from elaunch.trainer.memory.pieces import Cutter, StoredPiece, held_by
from elaunch.trainer.memory.recovery_plan import Choice, Held, Parts, choose, digest_of
from elaunch.trainer.memory.slots import Slot, Slots, Torn, node_of, tear_newer
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.packing import NotPlain, extended
from elaunch.trainer.state.region import Packed, Piece, Version, skeleton_of
from elaunch.trainer.state.tree import State, flatten

# Not used: names and shapes are checked when pieces are loaded.
_LAYOUT = bytes(16)


class ShardedMemory:
    """The snapshots of one job in `folder`, a directory in shared memory that all ranks of a node use.

    `generation` is the job's. `group` are the ranks that have the state, by default all of the job. `log` gets log
    messages. `copy_s` is how long the last `copy` stopped the training.
    """

    def __init__(
        self,
        folder: str | Path,
        group: dist.ProcessGroup | Peers | None = None,
        log: Callable[[str], None] = print,
        *,
        generation: int,
    ) -> None:
        self.folder = Path(folder)
        self.copy_s = 0.0
        self._log, self._generation = log, generation
        self._peers = group if isinstance(group, Peers) else Peers(group)
        self._nodes = self._peers.all_gather(node_of(self.folder))
        self._node = self._nodes[self._peers.rank]
        self._mates = [rank for rank, node in enumerate(self._nodes) if node == self._node]
        self._reports = self._mates[0] == self._peers.rank
        self._slots = self._slots_of(self._peers.rank)
        # With one node copies and snapshots share the slots.
        self._is_alone = len(set(self._nodes)) == 1
        self._copy_slots = self._slots if self._is_alone else self._slots_of(self._peers.rank, (2, 3))
        loss = "a lost node goes back to the last checkpoint"
        self._mirror = Mirror(self._peers, self._nodes, self._slots_of, log, loss=loss)
        self._cutter = Cutter(has_common=self._reports)
        self._signature = ""
        # The parts in this rank's piece, and the digest of the parts of all ranks together.
        self._parts: Parts = frozenset()
        self._whole = ""
        # Bytes of the file for this rank's piece.
        self._length = 0
        # `_full` is the newest snapshot that is whole on both nodes; `_newest` the one after it, on its way.
        self._full: Version | None = None
        self._newest: Version | None = None
        # Whether the last snapshot that was waited for is whole.
        self._was_whole = True
        # Whether there may be pieces of ranks that are gone, or on other nodes now.
        self._has_stale = True
        self.is_off = False
        # The piece that `copy` copies, and the newest version that it has copied since the last snapshot.
        self._live: LivePiece | None = None
        # Whether the last `save` was given tensors that `copy` cannot copy.
        self.is_refused = False
        self._copied: Version | None = None
        self.has_room_for_copies = True
        self._choice: Choice | None = None
        self._has_searched = False
        self._found: Mapping[str, Held] = {}

    def find(self) -> Choice | None:
        """The pieces of the newest snapshot that is complete on the living nodes; None if there is none. Collective.

        The next `load` loads them. The ranks of a node share the work of reading and checking its pieces.
        """
        self.wait()
        on_node: dict[str, dict[str, Held]] = {node: {} for node in self._nodes}
        for node, held in zip(self._nodes, self._peers.all_gather(self._share()), strict=True):
            on_node[node] |= held
        self._choice = choose({node: held.values() for node, held in on_node.items()}, self._nodes)
        self._found, self._full = on_node[self._node], self._choice.version if self._choice else None
        self._has_searched = True
        return self._choice

    def _share(self) -> dict[str, Held]:
        """The whole pieces in this rank's share of the node's files, by file name. They are read and checked here."""
        whole = {}
        names = sorted(path.name for path in self.folder.glob("piece-*"))
        for name in names[self._mates.index(self._peers.rank) :: len(self._mates)]:
            slot = Slot(self.folder / name, _LAYOUT)
            header = slot.header()
            if header is not None and slot.is_intact(header):
                with contextlib.suppress(Torn):
                    whole[name] = held_by(header.piece, skeleton_of(slot.region(), header))
        return whole

    def load(self, state: State) -> Version | None:
        """Load the newest complete snapshot into `state`, as `Checkpoints.load_newest` does. Returns its version.

        Pieces that came from other nodes lack one copy until the next `save`, so call `save` right after the restart.
        All other snapshots in the folder are deleted.
        """
        if not self._has_searched:
            self.find()
        if self._choice is not None:
            pieces.load(self._choice, self._opened(self._choice), state, self._peers)
        # Wait for all ranks: none may list files while they are being deleted.
        self._peers.all_gather(None)
        chosen = {name for name, held in self._found.items() if self._is_chosen(held)}
        self._delete(lambda name: name not in chosen)
        self._has_stale = bool(chosen)
        return self._full

    def save(self, step: int, state: State, rest: State | None = None, live: Sequence[Tensor] | None = None) -> None:
        """Copy this rank's part of the state after `step`. The state may change after this returns.

        First waits until every rank's part of the last snapshot is whole on both nodes. If the memory is too small, it
        logs that and makes no more snapshots. Raises TypeError for a value that a state cannot hold. `rest` is a part
        of the state that is small, and the same on all ranks. `live` are the tensors that training changes in place:
        if the state has no other tensors, `copy` can copy them later.
        """
        if self.is_off:
            return
        tree = flatten(state)
        signature, is_first = tree.signature(), not self._signature
        is_other = signature != self._signature
        if is_other:
            self._signature, self._parts = signature, self._cutter.parts(tree)
        piece = self._cutter.pack(state, tree, self._parts, self._whole)
        packed = extended(piece, rest or {})
        if is_first and not self._has_searched:
            # The snapshots of an earlier generation are overwritten in the order of their age.
            self.find()
        self.wait()
        self._copied = None
        self._has_searched = False
        slot = self._slots.older(self._spare)
        if self._any(is_other or packed.length > slot.size):
            self._whole = digest_of(frozenset().union(*self._peers.all_gather(self._parts)))
            piece = self._cutter.pack(state, tree, self._parts, self._whole)
            packed = extended(piece, rest or {})
            if not self._allocate(slot, packed.length):
                return
        self._length = slot.size
        slot.begin(packed, copy_from_devices)
        self._newest = version = Version(self._generation, step)
        self._live = LivePiece.of(piece, live) if live is not None and self.has_room_for_copies else None
        self.is_refused = live is not None and self.has_room_for_copies and self._live is None

        def finish() -> Tensor:
            return slot.raw(slot.finish(self._piece(version), packed).length)

        self._mirror.exchange(finish, version, self._spare)
        # A rank without room for its record has no `live`; the others must not wait for it.
        if self._is_alone and self._any(live is not None):
            # There is no other node to send it to, and the next copy may overwrite the version before.
            self.wait()

    @property
    def kept(self) -> Version | None:
        """The newest version of this rank's piece that is whole on this node. For any thread."""
        own = self._slots_of(self._peers.rank, range(4)).versions()
        return own[0][0].version if own else None

    @property
    def being_written(self) -> list[Slot]:
        """The slots in which a thread of this process is writing this rank's piece. For any thread."""
        return [slot for slot in {*self._slots.slots, *self._copy_slots.slots} if slot.is_being_written]

    @property
    def can_copy(self) -> bool:
        """Whether this rank may call `copy` after the next step. All ranks must agree on it, at the end of a step.

        Then every rank's piece of the step before is whole, and a copy overwrites an older one.
        """
        return self._live is not None and self._mirror.has_finished

    def copy(self, step: int, rest: State, live: Sequence[Tensor] | None) -> bool:
        """Copy the pieces of the state after `step`, as `save` with these arguments does, but to their own node alone.

        Returns whether all ranks have copied. If a rank cannot (its tensors were replaced since the last `save`, or
        `live` is None, or there is no room), it makes no copy before the next `save`. `copy_s` is how long it took.
        """
        begun_s = time.monotonic()
        version = Version(self._generation, step)
        live_piece, self._live = self._live, None
        if live is not None and live_piece is not None:
            with contextlib.suppress(NotPlain):
                self._live = live_piece if self._write_copy(version, live_piece.now(live, rest)) else None
        self.copy_s = time.monotonic() - begun_s
        self._copied = None if self._any(self._live is None) else version
        if self._is_alone and self._copied:
            # Snapshots share the slots with copies, and must not overwrite this one.
            self._full = version
        return self._copied is not None

    def _write_copy(self, version: Version, packed: Packed | None) -> bool:
        slot = self._copy_slots.older([self._copied] if self._copied else self._spare)
        if packed is None or packed.length > self._length or self._unfit(slot, self._length):
            return False
        slot.write(self._piece(version), packed, copy_from_devices)
        return True

    def close(self) -> None:
        """Close the connections to other nodes, after `wait`."""
        self._mirror.close()

    def wait(self) -> bool:
        """Wait until the last snapshot is whole on every node. False if that failed; the snapshot before it stays.

        All ranks agree on that. If it is whole, older ones may be overwritten or deleted. If not, the next snapshot
        overwrites the failed one.
        """
        if self._newest is None:
            return self._was_whole
        version, self._newest = self._newest, None
        self._was_whole = self._mirror.settle()
        if not self._was_whole:
            return False
        self._full = version
        if self._has_stale:
            self._has_stale = False
            held = [rank for rank, target in enumerate(self._mirror.targets) if target in self._mates]
            own = range(2 if self._is_alone else 4)
            current = {
                slot.path.name
                for rank in (*self._mates, *held)
                for slot in self._slots_of(rank, own if rank in self._mates else (0, 1)).slots
            }
            self._delete(lambda name: name not in current)
        return True

    def drop_newer(self, version: Version) -> None:
        """Declare this node's pieces that are newer than `version` torn: those steps are given up."""
        if self._reports:
            tear_newer(self.folder.glob("piece-*"), version)

    @property
    def copied(self) -> Version | None:
        """The newest version whose copies are as good as a snapshot. The same on all ranks.

        None if copies have stopped, or if there is another node.
        """
        return self._copied if self._is_alone else None

    def _piece(self, version: Version) -> Piece:
        return Piece(version, self._peers.world_size, self._peers.rank)

    @property
    def _spare(self) -> list[Version]:
        """The snapshots that must not be overwritten."""
        return [] if self._full is None else [self._full]

    def _any(self, fact: bool) -> bool:
        """Whether `fact` is True on any rank. Collective."""
        return self._peers.all_reduce_max([int(fact)]) == [1]

    def _allocate(self, slot: Slot, length: int) -> bool:
        """Allocate this rank's piece of a version. Returns False, for good, if a rank has no room."""
        problem = self._unfit(slot, length)
        if self._any(bool(problem)) and not self._is_alone and self.has_room_for_copies:
            # Copies are deleted first. Every rank tries again, since this may have freed room on another rank's node.
            self.has_room_for_copies = False
            for slot_of_copy in self._copy_slots.slots:
                # The restored state may be in it.
                if (header := slot_of_copy.header()) is None or header.version != self._full:
                    slot_of_copy.delete()
            problem = self._unfit(slot, length)
        if self._any(bool(problem)) and self._mirror.is_on:
            # Then second copies.
            self._mirror.delete()
            self._mirror.give_up(problem)
            problem = self._unfit(slot, length)
        if not self._any(bool(problem)):
            return True
        self.is_off = True
        self._slots.delete()
        self._mirror.delete()
        if problem:
            self._log(
                f"rank {self._peers.rank}: no room for a snapshot of {length / 1e6:,.1f} MB in {self.folder} "
                f"({problem}); there are no snapshots of the sharded state, only its checkpoints"
            )
        return False

    def _unfit(self, slot: Slot, length: int) -> str:
        """Give the slot's file that length. Returns why that fails; empty if it succeeds."""
        try:
            slot.fit(length)
        except OSError as error:
            problem = error.strerror or str(error)
            # The folder may have been removed.
            with contextlib.suppress(OSError):
                space = os.statvfs(self.folder)
                problem += f"; {space.f_bavail * space.f_frsize / 1e6:,.1f} MB are free there"
            return problem
        return ""

    def _slots_of(self, rank: int, numbers: Sequence[int] = (0, 1)) -> Slots:
        return Slots(self.folder / f"piece-{rank}", _LAYOUT, numbers)

    def _opened(self, choice: Choice) -> dict[int, StoredPiece]:
        """The pieces of the chosen snapshot on this node, by rank."""
        opened = {}
        for name, held in self._found.items():
            slot = Slot(self.folder / name, _LAYOUT)
            header = slot.header()
            if self._is_chosen(held) and header is not None and header.piece == held.piece:
                opened[held.piece.rank] = StoredPiece(slot, header)
        return opened

    def _is_chosen(self, held: Held) -> bool:
        return self._choice is not None and held.piece == self._choice.piece(held.piece.rank)

    def _delete(self, is_stale: Callable[[str], bool]) -> None:
        """Delete files of this node; one rank does. No rank makes new ones before its next collective."""
        if self._reports:
            for path in self.folder.glob("piece-*"):
                if is_stale(path.name):
                    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class LivePiece:
    """`packed` refers to the tensors that training changes in place, and `addresses` are those of all such tensors.

    Flattening a state takes longer than copying a small one, since FSDP2 looks up each name. So it is done once.
    """

    packed: Packed
    addresses: Sequence[int]

    @classmethod
    def of(cls, packed: Packed, live: Sequence[Tensor]) -> LivePiece | None:
        """The piece; None if some of its tensors are copies of the training's tensors, which are `live`."""
        storages = {_local(tensor).untyped_storage().data_ptr() for tensor in live}
        if any(part.numel() and part.untyped_storage().data_ptr() not in storages for part in packed.tensors):
            return None
        return cls(packed, _addresses(live))

    def now(self, live: Sequence[Tensor], rest: State) -> Packed | None:
        """The piece with the present content and `rest`; None if the training has replaced a tensor."""
        return extended(self.packed, rest) if _addresses(live) == self.addresses else None


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [_local(tensor).data_ptr() for tensor in tensors]


def _local(tensor: Tensor) -> Tensor:
    # DTensor.to_local() takes 10 us, and there are hundreds of tensors.
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
