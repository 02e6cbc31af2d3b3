"""One checkpoint in the making: written, sealed and published by a thread while training goes on.

Each rank sends rank 0 the account of what it has written, over connections that these threads have for themselves.
Rank 0 waits for all of them and then writes the rest. If a rank dies, rank 0 gets an error at once, and the checkpoint
stays unpublished.
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


@dataclass
class Writing:
    """One checkpoint to write, in the unpublished `folder`, by `thread`. `plain` is the packed rest of the state.

    `ranks` write it together, and use these connections in no other thread. With None this rank writes all of it.
    `on_published` is called in the thread, on rank 0. `failure` says why there will be no checkpoint, empty as far as
    this rank knows.
    """

    mark: Mark
    storage: Storage
    folder: Folder
    plan: dcp.Plan
    copies: dcp.Copies
    plain: bytes
    ranks: Peers | None
    keep: int
    require_ours: Callable[[], None]
    on_published: Callable[[], None]
    failure: str = ""

    def __post_init__(self) -> None:
        # A daemon: a process that is on its way out with an exception does not wait for the disk.
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def _run(self) -> None:
        is_published = False
        try:
            part = self._write_part()
            parts = [part] if self.ranks is None else self.ranks.to_rank_0(part)
            if parts is None:
                return
            # By now no rank writes in the folder any more.
            whole = [each for each in parts if each is not None]
            if len(whole) == len(parts):
                self._seal_and_publish(self.plan.metadata, whole)
                is_published = True
        # The edge of the thread; torch makes a RuntimeError of many things that a disk can do.
        except Exception as error:
            self.failure = self.failure or reason(error)
            if self.ranks is not None and not self.ranks.leads:
                return
        # Other ranks may still write: what they add is swept by the next start. Old checkpoints that stay cost room,
        # and are tried again after the next.
        with contextlib.suppress(OSError):
            if is_published:
                keep_newest(self.storage, self.keep, self.mark)
            else:
                discard(self.folder)
        if is_published:
            self.on_published()

    def _write_part(self) -> dcp.Part | None:
        try:
            return dcp.write(self.folder, 0 if self.ranks is None else self.ranks.rank, self.plan.items, self.copies)
        except Exception as error:
            self.failure = reason(error)
            return None

    def _seal_and_publish(self, metadata: dcp.Metadata | None, parts: list[dcp.Part]) -> None:
        assert metadata is not None
        files: dict[str, tuple[int, int]] = {PLAIN: (len(self.plain), zlib.crc32(self.plain))}
        self.folder.write(PLAIN, self.plain)
        for part in (*parts, dcp.finish(self.folder, metadata, parts)):
            files.update(part.files)
        # Nothing is published that no rank would read.
        require_size(LAYOUT, files[LAYOUT][0], LAYOUT_BYTES_MAX)
        require_size(PLAIN, files[PLAIN][0], PLAIN_BYTES_MAX)
        self.require_ours()
        self.storage.publish(self.folder, Manifest(self.mark, len(parts), files))
