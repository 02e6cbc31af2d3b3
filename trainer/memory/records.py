"""The own state of each rank in the node's memory, and the newest step that it completed."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from elaunch.trainer.memory.recovery_plan import Record
from elaunch.trainer.memory.slots import Slot, Slots
from elaunch.trainer.state.packing import pack
from elaunch.trainer.state.region import Header, Packed
from elaunch.trainer.state.version import Piece, Version

_NOTHING = pack({})


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

        If the same object comes again nothing in it has changed since.
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

    def _piece(self, version: Version) -> Piece:
        return Piece(version, self._world_size, self.rank)


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
