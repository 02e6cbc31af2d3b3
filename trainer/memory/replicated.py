"""Training state in host memory that outlives the workers: files in the folder that ELAUNCH_MEMORY names.

    NAME.state-0, NAME.state-1     the replicated state, twice per node: one is whole while the other is written
    NAME.rank-R-0, NAME.rank-R-1   rank R's own state (buffers, random states), after even and after odd steps
    NAME.rank-R-2, NAME.rank-R-3   the same and R's large part, of the newest two snapshots
    NAME.done-R                    the newest step that rank R completed

All files have one format (`packing`). A SIGKILL at any point of a write leaves no file that looks whole but is not. A
NAME contains no dot, so that the files of one training are never taken for another's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pickle
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.memory.recovery_plan import Holding, Record
from elaunch.trainer.state.packing import (
    Header,
    Packed,
    finish_region,
    header_of,
    is_intact,
    mark,
    pack,
    tear,
    unpack,
    views,
)
from elaunch.trainer.state.version import Version

Copy = Callable[[list[Tensor], list[Tensor]], None]

# How long to wait for another worker of the node. After a failure the agent kills a stopped worker when --failure-grace
# (2 s) is over, and that frees the lock. The waiting worker has reported that it saves, so it has --stop-grace (30 s).
# A first copy takes 2 s per GB, since the kernel clears its pages.
_LOCK_S = 20.0
_LOCK_S_PER_BYTE = 4e-9
_LOCK_POLL_S = 0.001


class NoRoom(Exception):
    """The memory's file system is too small: this node's copies need `needed` bytes, and `free` bytes are there."""

    def __init__(self, folder: Path, needed: int, free: int) -> None:
        self.needed, self.free = needed, free
        super().__init__(
            f"{folder.parent} has {free / 1e6:,.1f} MB free and this node's copies of the training state take "
            f"{needed / 1e6:,.1f} MB; there are none, and a failure goes back to the last checkpoint (in a container, "
            "give /dev/shm more: docker run --shm-size, elaunch submit k8s --shm)"
        )


def copy_on_host(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, both in host memory."""
    if targets:
        torch._foreach_copy_(targets, sources)


class Slot:
    """A mapped file with one region of `packing`. It only grows; its pages are allocated before they are written."""

    def __init__(self, path: Path, layout: bytes) -> None:
        self.path = path
        self._layout = layout
        self._region = torch.empty(0, dtype=torch.uint8)
        self._shape: tuple[object, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that the file takes now."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def header(self) -> Header | None:
        """The header of the state in the file; None if the file is torn or was made for another state."""
        header = header_of(self.region())
        return header if header is not None and header.layout == self._layout else None

    def region(self) -> Tensor:
        """The whole file as uint8."""
        if self.size != self._region.numel():
            self._region = _mapped(self.path)
            self._shape = ()
        return self._region

    def grow(self, size: int) -> None:
        """Make the file at least `size` bytes long. Raises OSError without room, instead of a SIGBUS later."""
        if self.size < size:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)

    def write(self, version: Version, packed: Packed, copy: Copy = copy_on_host) -> Header:
        """Write a state. The slot is torn until everything is written."""
        self.grow(packed.length)
        region = self.region()
        tear(region)
        shape = (packed.skeleton_room, [(tensor.dtype, tensor.shape) for tensor in packed.tensors])
        if shape != self._shape:
            # The checksum also covers the gaps between the tensors.
            region.zero_()
            self._shape = shape
        copy(views(region, packed), packed.tensors)
        return finish_region(region, self._layout, version, packed)

    def is_intact(self, header: Header) -> bool:
        """Whether the content has not changed since `write`."""
        return is_intact(self.region(), header)

    def read(self, header: Header) -> Any:
        """The state as views of the memory. Copy what you keep."""
        return unpack(self.region(), header)

    def raw(self, length: int) -> Tensor:
        """The first `length` bytes of the file, to send them, or to receive into them after `tear`."""
        return self.region()[:length]

    def discard(self) -> None:
        """Declare the slot torn."""
        if self.size:
            tear(self.region())

    def accept(self) -> Header | None:
        """Declare the received content whole, if it is. Returns its header, else None."""
        region = self.region()
        header = header_of(region, marked=False)
        if header is None or header.layout != self._layout or not is_intact(region, header):
            return None
        mark(region)
        return header


class Pair:
    """Two slots: one is whole while the other is written."""

    def __init__(self, path: Path, layout: bytes, numbers: tuple[int, int] = (0, 1)) -> None:
        self.slots = tuple(Slot(path.with_name(f"{path.name}-{number}"), layout) for number in numbers)

    def versions(self) -> list[tuple[Header, Slot]]:
        """The whole slots, newest first. Their content is not verified."""
        found = [(header, slot) for slot in self.slots if (header := slot.header()) is not None]
        return sorted(found, key=lambda pair: pair[0].version, reverse=True)

    def older(self, spare: Collection[Version] = ()) -> Slot:
        """The slot to write next; if possible none with a version in `spare`."""
        whole = self.versions()
        torn = [slot for slot in self.slots if all(slot is not other for _, other in whole)]
        oldest_first = [slot for header, slot in reversed(whole) if header.version not in spare]
        return next(iter((*torn, *oldest_first, *self.slots)))


class ReplicatedMemory:
    """This node's copies of the replicated state. One worker at a time writes; if it dies, the kernel frees its lock.

    `layout` is the digest of the state's names and shapes: copies of another state are overwritten, not read.
    """

    def __init__(self, folder: Path, name: str, layout: bytes) -> None:
        self.folder = folder
        self._lock_path = folder / f"{name}.lock"
        self.pair = Pair(folder / f"{name}.state", layout)

    @property
    def node(self) -> str:
        """An identifier of this memory: equal for all processes that share it, and for no other."""
        found = self.folder.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{found.st_dev}-{found.st_ino}"

    @property
    def free(self) -> int:
        """Bytes available for a copy: the free bytes, and those of the slot that is written next."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize + self.pair.older().size

    def save(
        self,
        version: Version,
        state: Callable[[], object],
        copy: Copy = copy_on_host,
        spare: Collection[Version] = (),
    ) -> Version:
        """Store `version` unless it or a newer one is in memory. Returns the newest one there.

        Waits while another worker of the node writes: it may be writing the same version. Copies in `spare` are never
        overwritten; if they leave no slot, nothing is written. Raises NoRoom, OSError, NotPlain.
        """
        with self.locked():
            whole = [header.version for header, _ in self.pair.versions()]
            newest = next(iter(whole), None)
            if newest is not None and (newest >= version or (len(whole) > 1 and set(whole) <= set(spare))):
                return newest
            packed = pack(state())
            self._reserve(packed.length)
            return self.pair.older(spare).write(version, packed, copy).version

    def verified(self, *, all_of_them: bool, say: Callable[[str], None]) -> list[Holding]:
        """The newest verified copy, or all of them. Damaged copies are reported by `say` and declared torn."""
        found = []
        for header, slot in self.pair.versions():
            if slot.is_intact(header):
                found.append(Holding(header.version, header.checksum, header.length))
                if not all_of_them:
                    break
            else:
                say(f"skipping the copy of step {header.version.step} in {slot.path}: its checksum is wrong")
                slot.discard()
        return found

    def find(self, version: Version, checksum: int) -> tuple[Header, Slot] | None:
        """The slot with that state."""
        return next(
            ((h, slot) for h, slot in self.pair.versions() if (h.version, h.checksum) == (version, checksum)), None
        )

    def drop_newer(self, version: Version) -> None:
        """Declare copies newer than `version` torn: those steps are given up, and must not be found again."""
        with self.locked():
            for header, slot in self.pair.versions():
                if header.version > version:
                    slot.discard()

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
                # Read the size each time: the writer of the first copy may not have set it yet.
                limit_s = _LOCK_S + _LOCK_S_PER_BYTE * max(slot.size for slot in self.pair.slots)
                if time.monotonic() - begun_s > limit_s:
                    reason = f"another worker of this node has held the lock for {limit_s:.1f} s; is it stopped?"
                    raise TimeoutError(errno.ETIMEDOUT, reason, self._lock_path) from None
            time.sleep(_LOCK_POLL_S)

    def _reserve(self, length: int) -> None:
        """Allocate both copies at once, so that the second one cannot fail later."""
        needed = sum(max(0, length - slot.size) for slot in self.pair.slots)
        if not needed:
            return
        found = os.statvfs(self.folder)
        free = found.f_bavail * found.f_frsize
        if needed > free:
            raise NoRoom(self.folder, 2 * length, free)
        for slot in self.pair.slots:
            slot.grow(length)


class Records:
    """The own state of rank `rank`, and its newest completed step. That rank writes them; its successors read them."""

    def __init__(self, folder: Path, name: str, layout: bytes, rank: int) -> None:
        self.rank = rank
        path = folder / f"{name}.rank-{rank}"
        self._staged = Pair(path, layout)
        self.kept = Pair(path, layout, (2, 3))
        self._done = Slot(folder / f"{name}.done-{rank}", layout)

    def stage(self, version: Version, state: object) -> None:
        """Store the own state that belongs to `version` once its step completes. The one before stays."""
        self._staged.slots[version.step % 2].write(version, pack(state))

    def keep(self, version: Version, state: object, spare: Collection[Version] = ()) -> Tensor:
        """Store the own state of a snapshot; the last two and those in `spare` stay. Returns its region."""
        slot = self.kept.older(spare)
        return slot.raw(slot.write(version, pack(state)).length)

    def done(self, version: Version) -> None:
        """Note that this rank has completed `version`."""
        self._done.grow(_DONE_BYTES)
        region = self._done.region()
        content = _DONE.pack(version.generation, version.step)
        content += zlib.crc32(content).to_bytes(4, "little")
        region[:_DONE_BYTES].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def completed(self) -> Version | None:
        """The newest completed step; None if there is none, or if its checksum is wrong."""
        region = self._done.region()
        if region.numel() < _DONE_BYTES:
            return None
        content = bytes(region[:_DONE_BYTES].tolist())
        numbers, crc = content[: _DONE.size], content[_DONE.size :]
        return Version(*_DONE.unpack(numbers)) if zlib.crc32(numbers).to_bytes(4, "little") == crc else None

    def versions(self) -> list[tuple[Header, Slot, bool]]:
        """All records here, each with whether it has the large part. Not verified."""
        staged = [(header, slot, False) for header, slot in self._staged.versions()]
        return [(header, slot, True) for header, slot in self.kept.versions()] + staged

    def find(self, version: Version) -> Any:
        """This rank's own state of that version as views of the memory, if possible with the large part; else None."""
        for header, slot, _ in self.versions():
            if header.version == version and slot.is_intact(header):
                with contextlib.suppress(pickle.UnpicklingError, ValueError):
                    return slot.read(header)
        return None

    def drop_newer(self, version: Version) -> None:
        """Declare records newer than `version` torn: those steps are given up."""
        for header, slot, _ in self.versions():
            if header.version > version:
                slot.discard()


def records_in(folder: Path, name: str, layout: bytes) -> list[Records]:
    """The records of all ranks in a node's memory: its own ranks and those that it mirrors."""
    kinds = (path.name.removeprefix(f"{name}.").split("-") for path in folder.glob(f"{name}.*-*"))
    ranks = sorted({int(numbers[0]) for kind, *numbers in kinds if kind in ("rank", "done")})
    return [Records(folder, name, layout, rank) for rank in ranks]


def verified_records_in(folder: Path, name: str, layout: bytes) -> list[Record]:
    """All whole records in a node's memory."""
    return [
        Record(records.rank, header.version, full)
        for records in records_in(folder, name, layout)
        for header, slot, full in records.versions()
        if slot.is_intact(header)
    ]


def completed_in(folder: Path, name: str, layout: bytes) -> Version | None:
    """The newest step that any rank of a node has completed."""
    done = (records.completed() for records in records_in(folder, name, layout))
    return max((version for version in done if version is not None), default=None)


_DONE = struct.Struct("<qq")
_DONE_BYTES = _DONE.size + 4


def _mapped(path: Path) -> Tensor:
    """The file's bytes, shared with every process that maps it; empty if there is no file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return torch.empty(0, dtype=torch.uint8)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
