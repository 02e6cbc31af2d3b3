"""One checkpoint in the making: written, sealed and published by a thread while training goes on.

Each rank tells rank 0 what it has written, or that it has failed, over connections that these threads have for
themselves. Rank 0 waits for all of them and then writes the rest. When a rank dies, rank 0 hears of it at once, and the
checkpoint stays unpublished.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from elaunch.trainer.checkpoint import dcp
from elaunch.trainer.checkpoint.storage import (
    LAYOUT,
    LAYOUT_BYTES_MAX,
    PLAIN,
    PLAIN_BYTES_MAX,
    Folder,
    Manifest,
    Mark,
    Storage,
    discard,
    keep_newest,
)
from elaunch.trainer.files import reason, require_size
from elaunch.trainer.ranks.peers import Peers


@dataclass(frozen=True)
class WriteOrder:
    """One checkpoint to write, in the unpublished `folder`. `plain` is the packed rest of the state.

    `ranks` write it together, and use these connections in no other thread. With None this rank writes all of it.
    """

    mark: Mark
    storage: Storage
    folder: Folder
    plan: dcp.Plan
    staging: dcp.Staging
    plain: bytes
    ranks: Peers | None
    keep: int
    require_ours: Callable[[], None] = lambda: None

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank


class Writing:
    """Begins at once. `on_published` is called in the thread, on rank 0.

    `failure` says why there will be no checkpoint, empty as far as this rank knows.
    """

    def __init__(self, order: WriteOrder, on_published: Callable[[], None]) -> None:
        self.order = order
        self.failure = ""
        self._on_published = on_published
        self._part_done = threading.Event()
        # A daemon: a process that is on its way out with an exception does not wait for the disk.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def own_part(self) -> str:
        """Wait until this rank has written its part, or failed: then the reason, else empty."""
        self._part_done.wait()
        return self.failure

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
        is_published = False
        try:
            parts = [part] if order.ranks is None else order.ranks.to_rank_0(part)
            if parts is None:
                return
            # By now no rank writes in the folder any more.
            whole = [each for each in parts if each is not None]
            if len(whole) == len(parts):
                self._seal_and_publish(whole)
                is_published = True
        # The edge of the thread; torch makes a RuntimeError of many things that a disk can do.
        except Exception as error:
            self.failure = self.failure or reason(error)
            if order.rank:
                return
        if not is_published:
            # Other ranks may still write: what they add is swept by the next start.
            with contextlib.suppress(OSError):
                discard(order.folder)
            return
        # Old ones that stay cost room, and are tried again after the next.
        with contextlib.suppress(OSError):
            keep_newest(order.storage, order.keep, order.mark)
        self._on_published()

    def _write_part(self) -> dcp.Part | None:
        order = self.order
        try:
            return dcp.write(order.folder, order.rank, order.plan.items, order.staging)
        except Exception as error:
            self.failure = reason(error)
            return None

    def _seal_and_publish(self, parts: list[dcp.Part]) -> None:
        order = self.order
        assert order.plan.metadata is not None
        files: dict[str, tuple[int, int]] = {PLAIN: (len(order.plain), zlib.crc32(order.plain))}
        order.folder.write(PLAIN, order.plain)
        for part in (*parts, dcp.finish(order.folder, order.plan.metadata, parts)):
            files.update(part.files)
        # Nothing is published that no rank would read.
        require_size(LAYOUT, files[LAYOUT][0], LAYOUT_BYTES_MAX)
        require_size(PLAIN, files[PLAIN][0], PLAIN_BYTES_MAX)
        order.require_ours()
        order.storage.publish(order.folder, Manifest(order.mark, len(parts), files))
