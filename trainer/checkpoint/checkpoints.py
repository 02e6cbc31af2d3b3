"""Durable checkpoints, written while training continues; the newest whole one by (generation, step) wins.

    checkpoints = Checkpoints("runs/x/checkpoints", generation=generation)
    mark = checkpoints.load_newest(state)       # in place; None where there is none
    checkpoints.save_async(step, state)         # periodically
    checkpoints.wait()                          # before the process ends

All ranks call all of these, in the same order. A *replicated* state (DDP: the same on every rank) is written by rank 0
alone, and read by it alone and sent to the others: no other rank need see the directory, and no other rank's death can
tear a checkpoint. A *sharded* one (FSDP, ZeRO-1) is written and read by all, in a directory that all see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from elaunch.trainer.checkpoint.filesystem import StorageError
from elaunch.trainer.checkpoint.loading import load_newest
from elaunch.trainer.checkpoint.storage import MANIFEST, Folder, Mark, Where, discard, marks, storage_at
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.packing import pack_plain
from elaunch.trainer.state.tree import State, Tree, flatten, some, tensors_sha256

if TYPE_CHECKING:
    # torch.distributed.checkpoint is slow to import; a start does without it.
    from elaunch.trainer.checkpoint.writing import Copies, Plan, Writing

__all__ = ["KEPT", "Checkpoints", "Mark", "marks", "tensors_sha256"]

KEPT = 3


class Checkpoints:
    """The checkpoints of one job in `directory`, which rank 0 makes, or below a URL (`s3://bucket/run`).

    `generation` is the job's (`ELAUNCH_GENERATION`, else the restart count). `log` logs a sentence, on rank 0. `group`
    are the ranks that have the state, by default all of the job. `failure` is what was logged on rank 0 if the newest
    one failed. At most one is being written: `save_async` waits for the one before. `require_ours` is called before
    each is published, and raises OSError if the directory belongs to another job by now.
    """

    def __init__(
        self,
        directory: Where,
        *,
        generation: int,
        keep: int = KEPT,
        log: Callable[[str], None] = print,
        group: dist.ProcessGroup | Peers | None = None,
        require_ours: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.storage = storage_at(directory)
        self.failure = ""
        self._last_logged = ""
        self._keep, self._log, self._require_ours = keep, log, require_ours
        self._ranks = group if isinstance(group, Peers) else Peers(group)
        # The generation to save under, and the marks that are taken.
        self._fence = generation
        self._taken: set[Mark] = set()
        self._plan: tuple[list[str], Plan] | None = None
        self._copies: Copies = {}
        self._writing: Writing | None = None
        self._is_prepared = False
        if self._ranks.leads:
            # If the storage does not respond, the first save tries again. A load reports the error.
            with contextlib.suppress(StorageError):
                self._prepare()

    def _prepare(self) -> None:
        """List the checkpoints and remove incomplete ones before the first save, on rank 0; raises OSError.

        A job that is started again on an old directory counts generations from the beginning again; its checkpoints
        must still be the newest.
        """
        self._taken = set(marks(self.storage))
        self._fence = max([self._fence, *(mark.generation for mark in self._taken)])
        if swept := self.storage.sweep(self._fence):
            why = f"without {MANIFEST}: its writer was killed, or that file was deleted"
            self._log(f"{self.storage}: removed {some(swept)}, {why}")
        self._is_prepared = True

    @property
    def newest_known(self) -> Mark | None:
        """The newest one, whole or not, that rank 0 has seen or written; None if it knows of none."""
        return max(self._taken, default=None)

    def load_newest(self, state: State) -> Mark | None:
        """Load the newest whole checkpoint into `state` and return its mark; None, and no change, if there is none.

        Tensors of `state` are filled in place, DTensors with this rank's part of them, at whatever world size they were
        saved; what the checkpoint has and `state` lacks is added, tensors in host memory. A corrupt checkpoint is
        logged, set aside and skipped. No code in a file is executed. Raises ValueError if `state` has a tensor that
        the checkpoint lacks, or of another shape.
        """
        return load_newest(self.storage, state, self._ranks, self._log)

    def save_async(self, step: int, state: State) -> None:
        """Begin a checkpoint of `state` after `step`; on return it may be changed.

        Errors of the disk are reported, never raised. The older checkpoints are untouched then. Raises TypeError for
        values that a checkpoint cannot hold.
        """
        parts = flatten(state)
        if not parts.is_sharded and not self._ranks.leads:
            return
        from elaunch.trainer.checkpoint import writing

        self.wait()
        self.failure = ""
        mark, folder = self._begin(step, parts)
        if folder is None:
            return
        plan = self._planned(parts)
        self._copies = writing.staged(plan.items, parts.tensors, self._copies)

        plain, writers = pack_plain(parts) if self._ranks.leads else b"", None
        if parts.is_sharded:
            # Each checkpoint has connections of its own, since those before may be broken. A disk may be slow.
            writers = self._ranks.apart("checkpoint")
            writers.meet(patient=True)

        def published() -> None:
            self._taken.add(mark)
            if self._last_logged:
                self._last_logged = ""
                self._log(f"the checkpoint of step {step} is written")

        self._writing = writing.Writing(
            mark=mark,
            storage=self.storage,
            folder=folder,
            plan=plan,
            copies=self._copies,
            plain=plain,
            ranks=writers,
            keep=self._keep,
            require_ours=self._require_ours,
            on_published=published,
        )
        self._writing.thread.start()

    def save(self, step: int, state: State) -> None:
        """Like `save_async`, but wait until it is durable, or has failed, which is logged."""
        self.save_async(step, state)
        self.wait()

    def poll(self) -> None:
        """Log a failed save as soon as that is known; not collective, so only for a replicated state."""
        writing = self._writing
        if writing is not None and writing.ranks is None and not writing.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written; all ranks call it before they exit."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.thread.join()
        failures = [writing.failure]
        if writing.ranks is not None:
            failures = self._ranks.all_gather(writing.failure)
            writing.ranks.close()
        if any(failures) and self._ranks.leads:
            reason = "; ".join(f"rank {r}: {why}" if r else why for r, why in enumerate(failures) if why)
            self._failed(writing.mark.step, reason)
        elif any(failures):
            # If the directory is not shared, only this rank sees what it has written.
            with contextlib.suppress(OSError):
                discard(writing.folder)

    def _failed(self, step: int, reason: str) -> None:
        if not self._is_prepared:
            newest = f"{self.storage} has not responded yet"
        elif self.newest_known is None:
            newest = f"there is none in {self.storage}"
        else:
            newest = f"the newest one in {self.storage} is of step {self.newest_known.step}"
        self.failure = f"the checkpoint of step {step} could not be written: {reason}; {newest}"
        # A retry usually fails for the same reason.
        if self.failure != self._last_logged:
            self._last_logged = self.failure
            self._log(self.failure)

    def _begin(self, step: int, parts: Tree) -> tuple[Mark, Folder | None]:
        """Name the checkpoint's folder on rank 0, for all ranks; None if that failed."""
        name = failure = ""
        if self._ranks.leads:
            try:
                if not self._is_prepared:
                    self._prepare()
                # The job was started again, and reached this step a second time.
                self._fence += Mark(self._fence, step) in self._taken
                name = self.storage.begin(Mark(self._fence, step)).name
            except OSError as error:
                failure = error.strerror or str(error)
        mark = Mark(self._fence, step)
        if parts.is_sharded:
            mark, name, failure = self._ranks.broadcast((mark, name, failure))
        if failure and self._ranks.leads:
            self._failed(step, failure)
        return mark, None if failure else self.storage.folder(name)

    def _planned(self, parts: Tree) -> Plan:
        """The plan of which rank writes what; made again only if the state's layout has changed on some rank."""
        from elaunch.trainer.checkpoint import writing

        layouts = [parts.signature()]
        if parts.is_sharded:
            layouts = self._ranks.all_gather(layouts[0])
        if self._plan is None or self._plan[0] != layouts:
            self._plan = layouts, writing.plan(parts.tensors, parts.paths, self._ranks if parts.is_sharded else None)
        return self._plan[1]
