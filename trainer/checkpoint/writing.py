"""One checkpoint in the making: written, sealed and published by a thread while training goes on.

The ranks meet in the files alone. A rank whose part is on the disk leaves `part-RRRRR` beside it; rank 0 waits for all
others' and then writes the rest. No collective is used here: it would have to be kept apart from training's, and a rank
whose peer has died would sit in it for minutes. When a rank dies, the checkpoint stays unpublished.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from elaunch.trainer.checkpoint import dcp
from elaunch.trainer.checkpoint.catalog import METADATA, PLAIN, Manifest, Mark, keep_newest
from elaunch.trainer.checkpoint.storage import METADATA_BYTES_MAX, PLAIN_BYTES_MAX, Folder, Storage
from elaunch.trainer.files import require_size

# A look over a network may fail; so many in a row are no accident.
_FAILED_LOOKS_MAX = 10


@dataclass(frozen=True)
class WriteOrder:
    """One checkpoint to write. `plain` is the packed rest of the state; `folder` is unpublished, `ranks` share it."""

    mark: Mark
    storage: Storage
    folder: Folder
    plan: dcp.Plan
    staging: dcp.Staging
    plain: bytes
    rank: int
    ranks: int
    keep: int


class Writing:
    """Begins at once. `on_published` is called in the thread, with the checkpoint's size in bytes, on rank 0.

    `failure` says why there will be no checkpoint, empty as far as this rank knows.
    """

    def __init__(self, order: WriteOrder, on_published: Callable[[int], None]) -> None:
        self.order = order
        self.failure = ""
        self._on_published = on_published
        self._part_done = threading.Event()
        self._given_up = threading.Event()
        # A daemon: a process that is on its way out with an exception does not wait for the disk.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def own_part(self) -> str:
        """Wait until this rank has written its part, or failed: then the reason, else empty."""
        self._part_done.wait()
        return self.failure

    def give_up(self) -> None:
        """The part of another rank will never come."""
        self._given_up.set()

    @property
    def is_over(self) -> bool:
        """Whether this rank has nothing left to do for it."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until this rank has nothing left to do for it."""
        self._thread.join()

    def _run(self) -> None:
        order = self.order
        part = self._write_part()
        self._part_done.set()
        if order.rank:
            return
        try:
            parts = self._all_parts(part)
            if parts:
                size = self._seal_and_publish(parts)
        # The edge of the thread; torch makes a RuntimeError of many things that a disk can do.
        except Exception as error:
            self.failure = _reason(error)
            parts = []
        if parts:
            # Old ones that stay cost room, and are tried again after the next.
            with contextlib.suppress(OSError):
                keep_newest(order.storage, order.keep, order.mark)
            self._on_published(size)
        else:
            order.storage.abandon(order.folder)

    def _write_part(self) -> dcp.Part | None:
        order = self.order
        try:
            part = dcp.write(order.folder, order.plan.items, order.staging)
        except Exception as error:
            self.failure = _reason(error)
            with contextlib.suppress(OSError):
                order.folder.remove(name for name in order.folder.names() if name.startswith(f"__{order.rank}_"))
            part = None
        if order.rank:
            try:
                self._say(pickle.dumps(part) if part else b"")
            except Exception as error:
                # What was written stays: rank 0 may have seen that it is there.
                self.failure = self.failure or _reason(error)
        return part

    def _say(self, words: bytes) -> None:
        """Send rank 0 this rank's part, or an empty one if there is none. Otherwise rank 0 would wait without end."""
        order = self.order
        try:
            order.folder.write(_part_name(order.rank), words)
        except OSError:
            # A disk that is full may have room for this.
            order.folder.write(_part_name(order.rank), b"")
            raise

    def _all_parts(self, own: dcp.Part | None) -> list[dcp.Part]:
        """Every rank's part, in order; empty if one has failed. Returns when no rank writes in the folder any more."""
        order = self.order
        parts = {0: own}
        missing = {_part_name(rank): rank for rank in range(1, order.ranks)}
        failed_looks = 0
        while missing:
            told: dict[str, bytes] = {}
            try:
                told = {name: order.folder.read(name, METADATA_BYTES_MAX) for name in order.folder.present(missing)}
                failed_looks = 0
            except OSError:
                failed_looks += 1
                if failed_looks == _FAILED_LOOKS_MAX:
                    raise
            for name, content in told.items():
                parts[missing.pop(name)] = dcp.read_part(content) if content else None
            order.folder.remove(told)
            if missing and self._given_up.wait(order.storage.poll_s):
                return []
        whole = [part for _, part in sorted(parts.items()) if part is not None]
        return whole if len(whole) == order.ranks else []

    def _seal_and_publish(self, parts: list[dcp.Part]) -> int:
        order = self.order
        assert order.plan.metadata is not None
        files: dict[str, tuple[int, int]] = {PLAIN: (len(order.plain), zlib.crc32(order.plain))}
        order.folder.write(PLAIN, order.plain)
        for part in (*parts, dcp.finish(order.folder, order.plan.metadata, parts)):
            files.update(part.files)
        # Nothing is published that no rank would read.
        require_size(METADATA, files[METADATA][0], METADATA_BYTES_MAX)
        require_size(PLAIN, files[PLAIN][0], PLAIN_BYTES_MAX)
        order.storage.publish(order.folder, Manifest(order.mark, order.ranks, files))
        return sum(length for length, _ in files.values())


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
