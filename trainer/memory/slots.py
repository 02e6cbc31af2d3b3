"""Files with one region of state each, in a folder in shared memory that outlives the workers.

A SIGKILL at any point of a write leaves no file that appears whole but is not.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.memory.capacity import allocate
from elaunch.trainer.state.packing import unpack
from elaunch.trainer.state.region import (
    Header,
    Label,
    Packed,
    Piece,
    Version,
    finish,
    header_of,
    is_intact,
    mark,
    tear,
    views,
)

Copy = Callable[[list[Tensor], list[Tensor]], None]


class Torn(ValueError):
    """The bytes that were read or received are not the state that was written."""


def node_of(folder: Path) -> str:
    """An identifier of this node's memory: equal for all processes that share the folder, and for no other."""
    found = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{found.st_dev}-{found.st_ino}"


def copy_on_host(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, both in host memory."""
    if targets:
        torch._foreach_copy_(targets, sources)


class Slot:
    """A mapped file with one region. Its pages are allocated before they are written."""

    def __init__(self, path: Path, layout: bytes) -> None:
        self.path = path
        self._layout = layout
        self._region = torch.empty(0, dtype=torch.uint8)
        self._shape: tuple[object, ...] = ()
        self._views: list[Tensor] = []
        # What `write_again` wrote last, if it is still there.
        self._written: tuple[Packed, Label] | None = None
        self._is_settled = threading.Event()
        self._is_settled.set()

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
            self._shape, self._written = (), None
        return self._region

    def grow(self, size: int) -> None:
        """Make the file at least `size` bytes long. Raises OSError if there is no space, instead of a SIGBUS later."""
        there = self.size
        if not there:
            # Views of an older file of this name are stale.
            self._forget()
        if there < size:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                allocate(descriptor, there, size)
            except OSError:
                # A partial allocation is useless, and the training may need the memory.
                os.ftruncate(descriptor, there)
                raise
            finally:
                os.close(descriptor)

    def fit(self, size: int) -> None:
        """Make the file `size` bytes long. One of another size is deleted first, so that its memory is free."""
        if self.size != size:
            self.delete()
            try:
                self.grow(size)
            except OSError:
                self.delete()
                raise

    def delete(self) -> None:
        """Delete the file, if there is one."""
        self._forget()
        self.path.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Drop all that is cached of the file."""
        self._region, self._views, self._shape = torch.empty(0, dtype=torch.uint8), [], ()
        self._written = None

    def write(self, piece: Piece, packed: Packed, copy: Copy = copy_on_host) -> Header:
        """Write a state. The slot is torn until everything is written."""
        self.grow(packed.length)
        self.begin(packed, copy)
        return self.finish(piece, packed)

    def write_again(self, piece: Piece, packed: Packed) -> None:
        """Like `write`, but only the header is written if `packed` was the last here: each step does this.

        Its tensors and the writer must be the same, and no other process may write to the file.
        """
        if self._written is None or self._written[0] is not packed:
            self._written = packed, Label(self.write(piece, packed), self._region)
        else:
            self._written[1].write(piece.version)

    def begin(self, packed: Packed, copy: Copy = copy_on_host) -> None:
        """Tear the slot and copy the tensors into it. They may change after this returns."""
        self._is_settled.clear()
        try:
            region, kinds = self.region(), [(tensor.dtype, tensor.shape) for tensor in packed.tensors]
            shape = (packed.skeleton_room, packed.offsets, kinds)
            self._written = None
            tear(region)
            if shape != self._shape:
                # The checksum also covers the gaps between the tensors.
                region.zero_()
                self._shape, self._views = shape, views(region, packed)
            copy(self._views, packed.tensors)
        except BaseException:
            self._is_settled.set()
            raise

    def finish(self, piece: Piece, packed: Packed) -> Header:
        """Declare the slot whole, after `begin`."""
        try:
            return finish(self.region(), self._layout, piece, packed)
        finally:
            self._is_settled.set()

    @property
    def is_being_written(self) -> bool:
        """Whether a thread of this process is between `begin` and the end of `finish`."""
        return not self._is_settled.is_set()

    def wait_until_settled(self, limit_s: float) -> None:
        """Wait until no thread of this process is between `begin` and the end of `finish`; `limit_s` at most."""
        self._is_settled.wait(limit_s)

    def is_intact(self, header: Header) -> bool:
        """Whether the content has not changed since `write`."""
        return is_intact(self.region(), header)

    def read(self, header: Header) -> Any:
        """The state as views of the memory. Copy what you keep."""
        return unpack(self.region(), header)

    def raw(self, length: int) -> Tensor:
        """The first `length` bytes of the file, to send them, or to receive into them after `discard`."""
        self._written = None
        return self.region()[:length]

    def discard(self) -> None:
        """Declare the slot torn."""
        self._written = None
        if self.size:
            tear(self.region())

    def accept(self, piece: Piece | Version, sender: int) -> Header:
        """Declare the received content whole, if it is that piece, or any rank's of that version. Raises Torn."""
        header = received(self.region(), piece, sender)
        if header.layout != self._layout:
            raise Torn(f"what rank {sender} has sent was made for another state")
        mark(self.region())
        return header


class Slots:
    """Two slots or more for one kind of state: some are whole while another is written."""

    def __init__(self, path: Path, layout: bytes, numbers: Sequence[int] = (0, 1)) -> None:
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

    def delete(self) -> None:
        """Delete all the files."""
        for slot in self.slots:
            slot.delete()


def received(region: Tensor, expected: Piece | Version, sender: int) -> Header:
    """The header of a region that was received without its mark. Raises Torn if it is not what was expected.

    Then this start has failed, and the next one may succeed.
    """
    header = header_of(region, marked=False)
    if header is None:
        raise Torn(f"what rank {sender} has sent is not whole: its header is damaged")
    if not is_intact(region, header):
        raise Torn(f"what rank {sender} has sent is not whole: its checksum is wrong")
    if expected not in (header.piece, header.version):
        raise Torn(f"what rank {sender} has sent is {header.piece}, not {expected}")
    return header


def tear_newer(paths: Iterable[Path], version: Version) -> None:
    """Declare torn the states in these files that are newer than `version`: those steps are given up."""
    for path in paths:
        region = _mapped(path)
        header = header_of(region)
        if header is not None and header.version > version:
            tear(region)


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
