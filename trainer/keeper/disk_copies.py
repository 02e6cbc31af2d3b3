"""Writes and restores the durable copies of a training's state: its checkpoints, also the final one."""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elaunch.trainer import link
from elaunch.trainer.checkpoint.checkpoints import KEPT, Checkpoints
from elaunch.trainer.checkpoint.claim import UNNAMED, Claim, NotOurs
from elaunch.trainer.checkpoint.loading import Unreadable, find_newest
from elaunch.trainer.checkpoint.storage import Storage
from elaunch.trainer.memory.recovery_plan import repeated
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import Version
from elaunch.trainer.state.training_state import Training

# The errors for which nothing can be written until somebody repairs them.
_LASTING = {getattr(errno, f"E{name}") for name in ("ACCES", "PERM", "ROFS", "NOTDIR", "EXIST", "NAMETOOLONG", "NOENT")}

# The backoff before each retry of the last checkpoint, in seconds.
_AGAIN_S = (1, 2, 4, 8, *(5,) * 9)


class NotDurable(OSError):
    """All steps are done, but every attempt to write the last checkpoint failed. Raised on all ranks."""


class DiskCopies:
    """The checkpoints in `storage` of generation `generation`; with None there are none, and every call does nothing.

    `folder` is the job's memory on this node. `report_failures`, `close` and `where_to_continue` are local to a rank;
    all other methods are collective.
    """

    def __init__(
        self,
        training: Training,
        peers: Peers,
        storage: Storage | None,
        generation: int,
        log: Callable[[str], None],
        kept: int = KEPT,
        name: str = UNNAMED,
        folder: str = "",
    ) -> None:
        self._training, self._peers, self._log = training, peers, log
        self._generation = generation
        # The newest step of which a checkpoint was begun or restored.
        self._newest = -1
        # The step of the newest whole checkpoint that was there at the start, as far as is known; 0 if there was none.
        self.found = 0
        self._storage, self._checkpoints = storage, None
        self._claim: Claim | None = None
        if storage is not None:
            self._claim = self._claimed(storage, name, Path(folder, f"{name}.job") if folder else None)
            ours = self._claim.require
            self._checkpoints = Checkpoints(
                storage, generation=generation, keep=kept, log=log, group=peers, require_ours=ours
            )
            self._require_writable(storage)
            if training.is_in_parts and storage.is_local and not generation:
                self._require_shared(storage)

    def _require_writable(self, storage: Storage) -> None:
        """Log why no checkpoint can be written. Raises ValueError on all ranks, at the job's start, if it is permanent.

        Later there may be a state in memory. Each rank writes its part of a state in parts.
        """
        failed: tuple[str, bool] = ("", False)
        if self._peers.leads or self._training.is_in_parts:
            try:
                storage.require_writable()
            except OSError as error:
                failed = error.strerror or str(error), error.errno in _LASTING
        of_all = self._peers.all_gather(failed)
        rank = next((rank for rank, (why, _) in enumerate(of_all) if why), None)
        if rank is None:
            return
        why, is_lasting = of_all[rank]
        text = f"checkpoints cannot be written to {storage}{f' by rank {rank}' if rank else ''}: {why}"
        if is_lasting and not self._generation:
            text += "; give another checkpoints="
            link.refuse(text)
            raise ValueError(text)
        if rank == self._peers.rank:
            self._log(f"{text}; until they can, there are none")

    def _require_shared(self, storage: Storage) -> None:
        """Raise ValueError on all ranks if one, which writes its part of a state, has a different directory there."""
        name, is_seen = f".shared-{secrets.token_hex(4)}", True
        if self._peers.leads:
            with contextlib.suppress(OSError):
                storage.files.write(name, b"")
        name = self._peers.broadcast(name)
        with contextlib.suppress(OSError):
            is_seen = storage.read_note(name) is not None
        unseen = [rank for rank, seen in enumerate(self._peers.all_gather(is_seen)) if not seen]
        if self._peers.leads:
            with contextlib.suppress(OSError):
                storage.files.remove(name)
        # If rank 0 does not see it either, it could not be written.
        if unseen and unseen[0]:
            text = (
                f"rank {unseen[0]} has a different directory at {storage} than rank 0; the checkpoints of a sharded "
                "state need one that all ranks share: give another checkpoints="
            )
            link.refuse(text)
            raise ValueError(text)

    def _claimed(self, storage: Storage, name: str, path: Path | None) -> Claim:
        """The job's claim on the checkpoints. Raises NotOurs on all ranks. `path` holds the job's identity."""
        known = path.read_text() if path is not None and path.exists() else ""
        jobs = [each for each in self._peers.all_gather(known) if each]
        job = jobs[0] if jobs else self._peers.broadcast(secrets.token_hex(8))
        if path is not None and not known:
            with contextlib.suppress(OSError):
                path.write_text(job)
        claim, why = Claim(storage, name, self._generation, self._log, job), ""
        if self._peers.leads:
            try:
                claim.take(lambda: link.phase("waiting for the end of another job"))
            except NotOurs as error:
                why = str(error)
        self._require_ours(why)
        return claim

    def _require_ours(self, why: str) -> None:
        if why := self._peers.broadcast(why):
            # A retry would fail in the same way.
            link.refuse(why)
            raise NotOurs(why)

    def restore(self, *, newer_than: int, done: int) -> tuple[Version, int] | None:
        """Load the newest checkpoint if its step is newer. Returns its version and the number of repeated steps.

        `done` is the newest completed step, from memory. Raises Unreadable if there may be a checkpoint, and nothing
        else to continue from.
        """
        if self._checkpoints is None or self._storage is None:
            return None
        try:
            found, unreached = find_newest(self._storage, self._peers, newer_than)
        except ValueError as error:
            # A retry would fail in the same way.
            link.refuse(str(error))
            raise
        newest = -1 if found is None else found.step
        if unreached and newer_than < 0:
            raise Unreadable(f"{unreached}; training does not start over while there may be some")
        if unreached:
            self._log_on_rank_0(f"{unreached}; the state in memory is restored")
        if newest <= newer_than:
            self.found = max(0, newest)
            return None
        try:
            mark = self._training.load_whole(self._checkpoints.load_newest, self._peers.rank, self._peers.world_size)
        except Unreadable as error:
            if newer_than < 0:
                raise
            self._log_on_rank_0(f"{error}; the older state in memory is restored")
            return None
        # It may be an older checkpoint, if the newest was torn.
        self.found = 0 if mark is None else mark.step
        if mark is None or mark.step <= newer_than:
            return None
        again = max(0, done - mark.step)
        # After another job no worker's memory is left, so the number of lost steps is unknown.
        lost = f"; {repeated(again)}" if done else ""
        hook = "; the communication hook starts with a new state" if self._training.has_large else ""
        self._log_on_rank_0(f"restored step {mark.step} from the checkpoint in {self._storage}{lost}{hook}")
        self._newest = mark.step
        return Version(self._generation, mark.step), again

    def write(self, version: Version, own: Callable[[], dict[str, Any]]) -> None:
        """Begin to write a checkpoint of this state, unless there is one. `own` returns what this rank alone has."""
        if self._checkpoints is None or version.step in (0, self._newest):
            return
        if self._claim is not None:
            self._require_ours(self._claim.lost)
        self._newest = version.step
        # Rank 0 alone writes a replicated state, and only it needs what the others have for themselves.
        buffers = self._training.buffers_apart(self._peers.broadcast, leads=self._peers.leads)
        mine = {**own(), "own_buffers": buffers}
        of_all = self._peers.all_gather(mine) if self._training.is_in_parts else self._peers.gather(mine) or []
        names = ("random", "per_rank", "own_buffers")
        of_ranks = {name: [its[name] for its in of_all if name in its] for name in names}
        self._checkpoints.save_async(version.step, self._training.whole(of_ranks))

    def report_failures(self) -> None:
        """Report failures of background writes as soon as they are known."""
        if self._checkpoints is not None:
            self._checkpoints.poll()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def leave(self) -> None:
        """Stop renewing the claim, also after an error: nothing more will be written."""
        if self._claim is not None:
            self._claim.leave()

    def close(self) -> None:
        """Release the claim, after `wait`."""
        if self._claim is not None and self._peers.leads:
            self._claim.release()

    def failure(self) -> str:
        """Why the newest checkpoint failed, or "". After a failure the checkpoint may be written again."""
        if self._checkpoints is None:
            return ""
        why = self._peers.broadcast(self._checkpoints.failure)
        if why:
            self._newest = -1
        return why

    def require_durable(
        self, version: Version, own: Callable[[], dict[str, Any]], stop_if_requested: Callable[[], object]
    ) -> None:
        """Retry a failed last checkpoint for a while: a state that is only in memory ends with the job.

        Raises NotDurable.
        """
        for number, again_s in enumerate(_AGAIN_S):
            if not (why := self.failure()):
                return
            left_s = sum(_AGAIN_S[number:])
            self._log_on_rank_0(
                f"{why}; it is the last one, and is retried for {left_s} s: fix the cause, or the program fails"
            )
            for _ in range(again_s):
                time.sleep(1)
                link.phase("writing the last checkpoint")
                stop_if_requested()
            self.write(version, own)
            self.wait()
        if why := self.failure():
            raise NotDurable(f"the final state is not durable: {why}")

    def where_to_continue(self, step: int) -> str:
        """From where the same command continues after a stop at `step`, as the rest of a sentence. Only on rank 0."""
        if self._checkpoints is None:
            return ""
        newest = self._checkpoints.newest_known
        if newest is None:
            return "; there is no checkpoint, so the same command starts over"
        where = "there" if newest.step == step else f"the checkpoint of step {newest.step}"
        return f"; the same command continues from {where}"

    def _log_on_rank_0(self, text: str) -> None:
        if self._peers.leads:
            self._log(text)
