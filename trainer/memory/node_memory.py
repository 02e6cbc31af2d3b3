"""Training state in host memory that outlives the workers: files in the folder that ELAUNCH_MEMORY names.

    NAME.state-0, NAME.state-1     the replicated state, twice per node: one is whole while the other is written
    NAME.rank-R-0, NAME.rank-R-1   rank R's own state (buffers, random states), after even and after odd steps
    NAME.rank-R-2 … -5             the same and R's large part, of the newest snapshots and copies
    NAME.done-R-0, NAME.done-R-1   the newest two steps that rank R completed
    NAME.lock                      who may write a copy
    NAME.said                      the kinds of the warnings that the job has printed (`keeper/entry_checks`)
    NAME.left                      the loops that the program left by `break`, as JSON (`keeper/boundary`)

All but the last three lines have one format (`region`). A NAME contains no dot, so that the files of one training are
never taken for another's.

`take_over` restores a group from them: it sends what a node lacks, and loads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from elaunch.trainer.memory.capacity import Capacity, capacity_in
from elaunch.trainer.memory.recovery_plan import Decision, Holding, Inventory, Record, RecordSource
from elaunch.trainer.memory.slots import Copy, Slot, Slots, copy_on_host, node_of, received, tear_newer
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.packing import pack, unpack
from elaunch.trainer.state.region import Header, Packed, Piece, Version
from elaunch.trainer.state.training_state import Training

# How long to wait for another worker of the node. After a failure the agent kills a stopped worker when --failure-grace
# (2 s) is over, and that frees the lock. The waiting worker has reported that it saves, so it has --stop-grace (30 s).
# A first copy takes 2 s per GB, since the kernel clears its pages.
_LOCK_S = 20.0
_LOCK_S_PER_BYTE = 4e-9
_LOCK_POLL_S = 0.001
_NOTHING = pack({})


class NoRoom(Exception):
    """This node's copies need `needed` bytes, and there is less room: in the file system, or in a cgroup."""

    def __init__(self, folder: Path, needed: int, capacity: Capacity) -> None:
        way_out = (
            "give the job more memory: docker run --memory, the pod's limit, sbatch --mem"
            if capacity.where
            else "in a container, give /dev/shm more: docker run --shm-size, elaunch submit k8s --shm"
        )
        super().__init__(
            f"{capacity.where or folder.parent} has {capacity.free / 1e6:,.1f} MB free and this node's copies of the "
            f"training state take {needed / 1e6:,.1f} MB; there are none, and a failure goes back to the last "
            f"checkpoint ({way_out})"
        )


class NodeMemory:
    """This node's memory for one training, in a group of `world_size` ranks, of which this is `rank`.

    It has copies of the replicated state and the records of ranks. One worker at a time writes a copy; if it dies, the
    kernel frees its lock. `layout` is the digest of the state's names and shapes: copies of another state are
    overwritten, not read. `reports` is True for one rank of each node, which lists and fills the memory for all. `log`
    gets a sentence for each torn copy.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        layout: bytes,
        rank: int = 0,
        world_size: int = 1,
        *,
        reports: bool = True,
        log: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.reports = folder, reports
        self._name, self._layout, self._rank, self._world_size, self._log = name, layout, rank, world_size, log
        self._lock_path = folder / f"{name}.lock"
        self.pair = Slots(folder / f"{name}.state", layout)

    def records(self, rank: int) -> Records:
        """The own state of that rank."""
        return Records(self.folder, self._name, self._layout, rank, self._world_size)

    def all_records(self) -> list[Records]:
        """The records of the node's own ranks, and of those that it mirrors."""
        kinds = (path.name.removeprefix(f"{self._name}.").split("-") for path in self.folder.glob(f"{self._name}.*-*"))
        ranks = {int(numbers[0]) for kind, *numbers in kinds if kind in ("rank", "done")}
        return [self.records(rank) for rank in sorted(ranks)]

    def completed(self) -> Version | None:
        """The newest step that any worker of this node has completed, dead workers included."""
        done = (records.completed() for records in self.all_records())
        return max((version for version in done if version is not None), default=None)

    def inventory(self, *, large: bool) -> Inventory:
        """The verified content of this memory, as one rank of the node lists it."""
        node = node_of(self.folder)
        if not self.reports:
            return Inventory(self._rank, node, reports=False)
        records = tuple(
            Record(records.rank, header.version, full)
            for records in self.all_records()
            for header, slot, full in records.versions()
            if slot.is_intact(header)
        )
        held = tuple(self.verified(all_of_them=large))
        return Inventory(self._rank, node, True, held, records, self.completed(), self.free)

    @property
    def free(self) -> int:
        """Bytes available for a copy: the free bytes, and those of the slot that is written next."""
        return capacity_in(self.folder).free + self.pair.older().size

    def save(
        self,
        version: Version,
        state: Callable[[], object],
        copy: Copy = copy_on_host,
        spare: Collection[Version] = (),
    ) -> Version:
        """Store `version` unless it or a newer one is in memory. Returns the newest one there.

        One worker at a time does, and the others find it there. Copies in `spare` are never overwritten; if they leave
        no slot, nothing is written. Raises NoRoom, OSError, NotPlain.
        """
        with self.locked():
            if newest := self._better(version, spare):
                return newest
            packed = pack(state())
            self._reserve(packed.length)
            self.pair.older(spare).write(Piece(version, self._world_size, self._rank), packed, copy)
        return version

    def _better(self, version: Version, spare: Collection[Version]) -> Version | None:
        """The newest version in memory, if `version` is not to be stored beside it."""
        whole = self.versions()
        newest = next(iter(whole), None)
        is_full = len(whole) > 1 and set(whole) <= set(spare)
        return newest if newest is not None and (newest >= version or is_full) else None

    def verified(self, *, all_of_them: bool) -> list[Holding]:
        """The newest verified copy, or all of them. Damaged copies are reported and declared torn."""
        found = []
        for header, slot in self.pair.versions():
            if slot.is_intact(header):
                found.append(Holding(header.version, header.checksum, header.length))
                if not all_of_them:
                    break
            else:
                self._log(f"skipping the copy of step {header.version.step} in {slot.path}: its checksum is wrong")
                slot.discard()
        return found

    def find(self, version: Version, checksum: int) -> tuple[Header, Slot] | None:
        """The slot with that state."""
        return next(
            ((h, slot) for h, slot in self.pair.versions() if (h.version, h.checksum) == (version, checksum)), None
        )

    def versions(self) -> list[Version]:
        """The versions of the whole copies, newest first. Their content is not verified."""
        return [header.version for header, _ in self.pair.versions()]

    def discard(self, version: Version) -> None:
        """Declare the copy of `version` torn, when no worker writes. Raises TimeoutError."""
        with self.locked():
            for header, slot in self.pair.versions():
                if header.version == version:
                    slot.discard()

    def drop_newer(self, version: Version) -> None:
        """Declare copies and records newer than `version` torn: those steps are given up, and must not be found."""
        with self.locked():
            for kind in ("rank", "state"):
                tear_newer(self.folder.glob(f"{self._name}.{kind}-*"), version)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the node's lock: a POSIX lock, which forked children do not inherit and a SIGKILL releases.

        Raises TimeoutError if another worker holds it for longer than a copy takes: that worker may be stopped.
        """
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        begun_s = time.monotonic()
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                # Computed each time: the writer of the first copy may not have set the size yet.
                limit_s = _LOCK_S + _LOCK_S_PER_BYTE * max(slot.size for slot in self.pair.slots)
                if time.monotonic() - begun_s > limit_s:
                    reason = f"another worker of this node has held the lock for {limit_s:.1f} s; is it stopped?"
                    raise TimeoutError(errno.ETIMEDOUT, reason, self._lock_path) from None
            time.sleep(_LOCK_POLL_S)

    def _reserve(self, length: int) -> None:
        """Allocate both copies together, so that the second one cannot fail later."""
        needed = sum(max(0, length - slot.size) for slot in self.pair.slots)
        if not needed:
            return
        capacity = capacity_in(self.folder)
        if needed > capacity.free:
            raise NoRoom(self.folder, 2 * length, capacity)
        for slot in self.pair.slots:
            slot.grow(length)


class Records:
    """The own state of rank `rank`, and its newest completed step. That rank writes them; its successors read them.

    `world_size` is the writer's.
    """

    def __init__(self, folder: Path, name: str, layout: bytes, rank: int, world_size: int = 1) -> None:
        self.rank, self._world_size = rank, world_size
        path = folder / f"{name}.rank-{rank}"
        # A rank may be a step ahead: it has stored what belongs to its next step, and another rank has not completed
        # the one before. If the group goes back to the step before that, its record is still there.
        self._staged = Slots(path, layout, (0, 1, 6))
        # The newest two snapshots, and the newest two copies between them.
        self._kept = Slots(path, layout, (2, 3, 4, 5))
        # Another node sends snapshots only.
        self.mirrored = Slots(path, layout, (2, 3))
        # Regions without content: a version and its checksum.
        self._done = Slots(folder / f"{name}.done-{rank}", layout)
        self._state: object = None
        self._packed: Packed | None = None

    def stage(self, version: Version, state: object) -> None:
        """Store the own state that belongs to `version` once its step completes. The two before stay.

        An object that is passed again must not have changed.
        """
        if self._packed is None or state is not self._state:
            self._state, self._packed = state, pack(state)
        self._staged.slots[version.step % 3].write_again(self._piece(version), self._packed)

    def keep(self, version: Version, state: object, spare: Collection[Version] = ()) -> Tensor:
        """Store the own state of a snapshot or a copy; the newest ones and those in `spare` stay. Returns its region.

        A state of that version that is there already is overwritten.
        """
        same = (slot for header, slot in self._kept.versions() if header.version == version)
        slot = next(same, None) or self._kept.older(spare)
        return slot.raw(slot.write(self._piece(version), pack(state)).length)

    def done(self, version: Version) -> None:
        """Note that this rank has completed `version`."""
        self._done.slots[version.step % 2].write_again(self._piece(version), _NOTHING)

    def completed(self) -> Version | None:
        """The newest completed step; None if there is none, or if its checksum is wrong."""
        return next((header.version for header, _ in self._done.versions()), None)

    def versions(self) -> list[tuple[Header, Slot, bool]]:
        """All records here, each with whether it has the large part. Not verified."""
        staged = [(header, slot, False) for header, slot in self._staged.versions()]
        return [(header, slot, True) for header, slot in self._kept.versions()] + staged

    def slot_of(self, version: Version) -> tuple[Header, Slot] | None:
        """Where this rank's own state of that version is, if possible with the large part."""
        its = ((header, slot) for header, slot, _ in self.versions() if header.version == version)
        return next(((header, slot) for header, slot in its if slot.is_intact(header)), None)

    def find(self, version: Version) -> Any:
        """This rank's own state of that version as views of the memory, if possible with the large part; else None."""
        found = self.slot_of(version)
        return None if found is None else found[1].read(found[0])

    def _piece(self, version: Version) -> Piece:
        return Piece(version, self._world_size, self.rank)


Stored = Callable[[], tuple[Header, Slot]]


def take_over(
    decision: Decision, inventories: list[Inventory], node_memory: NodeMemory | None, peers: Peers, training: Training
) -> None:
    """Load the decided state into the training's objects, each rank what it needs, wherever it is. Collective.

    A sharded state was loaded before: this adds what each rank has for itself.
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
    if node_memory is not None and node_memory.reports:
        node_memory.drop_newer(version)
    # Wait for all ranks before one of them stores a newer copy of this generation.
    peers.all_gather(None)


@dataclass(frozen=True)
class _Transfer:
    """Transfers the state of `decision` to this rank, whose node has `memory`. All ranks call its methods."""

    decision: Decision
    inventories: list[Inventory]
    memory: NodeMemory | None
    peers: Peers

    def replicated(self) -> Any:
        """The replicated state, as views of memory. It is sent along a chain of the ranks that lack it."""
        decision, rank = self.decision, self.peers.rank
        chain = (decision.source, *decision.receivers)
        if self.memory is None or rank in decision.private or rank not in decision.receivers:
            image = self._along(chain, self._copy, decision.version)
        else:
            image = None
            self._receive_into(self.memory, chain)
        if decision.receivers:
            # Other ranks of a receiver's node must not read before the state is there.
            self.peers.all_gather(None)
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
        arrived = self.peers.relay(chain, region)
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

            def allocated(length: int) -> Tensor:
                slot.grow(length)
                return slot.raw(length)

            arrived = self.peers.relay(chain, None, allocated)
            assert arrived is not None
            slot.accept(version, arrived[1])
