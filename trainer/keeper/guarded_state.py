"""The state between two commits: which step it belongs to, who may change it now, and who may copy it."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from torch import nn

from elaunch.trainer import link
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.hooks import LeftGradients
from elaunch.trainer.keeper.mutation_guard import MutationGuard
from elaunch.trainer.keeper.rehearsal import Rehearsal
from elaunch.trainer.ranks.group_status import GroupStatus, has_nccl, require_reported_aborts
from elaunch.trainer.state import Version
from elaunch.trainer.state.packing import NotPlain
from elaunch.trainer.state.training_state import Training

# NCCL's watchdog waits for a minute (four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC) before it ends the process.
_WATCH_S = 1.0


class GroupWatch:
    """Within the `with` block a thread polls `status` once a second, and calls `save` when a collective has failed.

    There is no thread if no group has a status. With `warns` it first logs the warning of `require_reported_aborts`,
    which may raise ValueError.
    """

    def __init__(
        self,
        status: GroupStatus,
        save: Callable[[], object],
        log: Callable[[str], None],
        *,
        warns: bool,
        poll_s: float = _WATCH_S,
    ) -> None:
        self._status, self._save, self._log = status, save, log
        self._warns, self._poll_s = warns, poll_s
        self._is_over = threading.Event()

    def __enter__(self) -> GroupWatch:
        is_known = self._status.is_known
        warning = require_reported_aborts(os.environ, has_nccl=has_nccl(), is_known=is_known)
        if warning and self._warns:
            self._log(warning)
        if is_known:
            threading.Thread(target=self._run, name="elaunch-group-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(self._poll_s):
            if error := self._status.error():
                self._log(f"a collective has failed, and this rank keeps its last complete step: {error}")
                try:
                    self._save()
                except Exception:
                    # The outermost frame of the thread. torch ends the process in any case.
                    traceback.print_exc()
                return


# The agent kills a worker once its state is saved, which takes up to `--stop-grace`.
_END_S = 30.0
_LEFT = 143
# If another worker has completed a step, this worker completes it within milliseconds or never.
_ARRIVAL_S = 0.3
_POLL_S = 0.001
# A rescue waits for a commit this long, plus this many times the longest commit so far. One that takes longer waits for
# the failed peer, in a collective within `optimizer.step`.
_COMMIT_S = 1.0
_COMMITS = 3
# The first commits of a process are checked, then those of steps that may be copied: at least one a second.
_CHECKED = 16


class GuardedState:
    """The state of `training`. The training's thread changes it; that one, the link's and `GroupWatch`'s copy it."""

    def __init__(self, training: Training, generation: int, rehearsal: Rehearsal | None = None) -> None:
        self._training, self._generation, self._rehearsal = training, generation, rehearsal
        self._be_at(Version(generation, 0))
        # Held while the state changes or is copied.
        self._lock = threading.Lock()
        # Whether the state is exactly that of `version`: neither half restored nor half changed.
        self._is_whole = False
        self._is_restored = False
        self._is_sealed = False
        # Whether `begin` was called and `end` was not: the training's thread holds the lock.
        self.is_changing = False
        self._is_stored = self._has_reported_draws = False
        self._commits = 0
        # The last step of the training, 0 if that is not known.
        self.total = 0
        # Whether it was checked that a restart can restore what the last commit has made.
        self.is_checked = True
        self._guard = MutationGuard(training.live_tensors)
        # Called with the step that a checked commit begins to complete.
        self.before_commit: Callable[[int], object] = id
        # Called in a commit: whether a sync point comes after it, at which the state may be copied.
        self.is_sync_point: Callable[[], bool] = bool
        self._begun_s = self._longest_s = 0.0
        # Whether what this rank alone has of the next step is copied within its commit, and whether that holds until
        # the next sync point. All ranks have agreed on that.
        self.copies_next = self.copies_each = False
        # Whether a rank could not make the last copy: all ranks know, and agree on what to do instead.
        self.has_failed_copy = False

    def _be_at(self, version: Version) -> None:
        # `next_version` is the one that the next commit makes.
        self.version, self.next_version = version, Version(self._generation, version.step + 1)

    def restored(
        self, copies: Copies, version: Version, report: Callable[[str], None], log: Callable[[str], None]
    ) -> None:
        """The state is that of `version` now, and `copies` keeps it.

        A change outside of a commit goes to `report`, for the next boundary, or after a failure to `log`.
        """
        with self._lock:
            self._copies, self._is_whole, self._is_restored = copies, True, True
            self._be_at(version)
            self._report, self._log = report, log
            self._guard.note()
            self._left = LeftGradients(self._training.model, self._training.optimizers, self._training.models)
            copies.gpu.after_commit()

    def may_be_copied(self) -> bool:
        """Whether a snapshot may be taken at this boundary: nothing has changed the state since the commit.

        Ranks that copy no replicated state skip the check.
        """
        if not (self._copies.paces or self._training.is_in_parts):
            return True
        may = self._guard.allow_copy(self.version.step)
        self._report_changes()
        return may

    def check_weights(self) -> None:
        """An evaluation may have swapped the weights for others, or restored them: compare their values."""
        self._guard.compare_values(self.version.step)
        self._report_changes()

    def check_buffers(self) -> None:
        """The next step begins: report buffers that have changed since the commit."""
        if warning := self._copies.own.changed_buffers(self.version.step):
            self._report(warning)

    def _report_changes(self) -> None:
        if warning := self._guard.warning(self.version.step):
            self._report(warning)

    def backward_begins(self, model: nn.Module) -> None:
        """A training backward pass of `model` begins, and has changed no gradient."""
        self._left.backward_begins(model)

    def begin(self) -> None:
        """The gradients are complete, and the state changes until `end`. Does not return after a peer's failure.

        Raises BrokenGroup if a collective of this step has failed: then the gradients are not whole.
        """
        if self.is_changing:
            raise RuntimeError(f"the commit of step {self.version.step + 1} has begun already; one step has one commit")
        self._require_clean(f"step {self.next_version.step} is not committed, since its gradients may be incomplete")
        self._commits += 1
        is_copied = self.copies_next or self._copies.copies_in_commit or self.is_sync_point()
        self.is_checked = is_copied or self._commits <= _CHECKED or self._rehearsal is not None
        if self.is_checked:
            self.before_commit(self.next_version.step)
        if left := self._left.commit_begins(self.next_version.step):
            link.refuse(left)
            raise RuntimeError(left)
        # If no gradient has reached the first parameter, no hook has done this.
        self._copies.own.store_changed(self.next_version)
        if self.copies_next:
            # Outside the lock: this waits for all ranks, and one of them may be dead.
            self.has_failed_copy = not self._copies.steps.before_commit(self.next_version)
        self._lock.acquire()
        if self._is_sealed:
            # A peer has failed. The saved state does not include this step, and the agent will kill this process.
            self._lock.release()
            time.sleep(_END_S)
            raise SystemExit(_LEFT)
        if self.is_checked or self._guard.has_changed():
            self._report_changes()
        self._guard.forget()
        settings = self._training.settings
        if self.is_checked and (warning := settings.replaced() or settings.unreduced()):
            self._report(warning)
        settings.forget()
        self.is_changing, self._is_whole = True, False
        self._begun_s = time.monotonic()

    def _require_clean(self, otherwise: str) -> None:
        """Wait until all that this rank has begun is done, and raise BrokenGroup if a collective has failed."""
        self._copies.gpu.before_commit(lambda: self._copies.groups.require_clean(otherwise))

    def store(self) -> None:
        """Store this rank's own state as it will be at the end of this commit, whose rest may take a long time."""
        self._training.settings.stepped(is_checked=self.is_checked)
        # The backward pass has stored this already, unless random numbers were drawn since.
        if self._copies.store(self.next_version, unless_same=True) and not self._has_reported_draws:
            self._has_reported_draws = True
            self._report(
                "random numbers were drawn, or an object of per_rank has changed, after the backward pass of step "
                f"{self.next_version.step} had begun: a rank that dies in that step, while others complete it, "
                "continues without that, unless all ranks draw the same. Draw, fetch and change these before "
                "loss.backward()"
            )
        self._is_stored = True

    def end(self, *, is_whole: bool = True) -> None:
        """The step is complete; without `is_whole` its changes have failed, and the state belongs to no step."""
        try:
            if is_whole:
                if self.is_checked:
                    self._require_kept(f"step {self.next_version.step} is not committed")
                if self._rehearsal is not None:
                    self._rehearsal.committing()
                is_first = not self.version.step and self._copies.copies_parts
                if is_first or (self.copies_next and self._training.is_in_parts):
                    # ZeRO-1's step has collectives, and this copy counts as whole.
                    self._require_clean(f"step {self.next_version.step} may be incomplete, and is not kept")
                self._copies.gpu.after_commit()
                if not self._is_stored:
                    self.store()
                if self._copies.copies_in_commit:
                    # The ranks of the node share the work, and none has completed the step before the copy is whole.
                    self._copies.save_replicated(self.next_version)
                if is_first:
                    self._copies.snapshot(self.next_version)
                    self._copies.before_snapshot()
                elif self.copies_next:
                    self.has_failed_copy |= not self._copies.steps.after_commit(self.next_version)
                self._guard.note(is_brief=not self.is_checked)
                self._be_at(self.next_version)
                self._is_whole = True
                self._left.commit_ended()
                self._longest_s = max(self._longest_s, time.monotonic() - self._begun_s)
                self._copies.done(self.version)
                link.report(self.version.step, self.total)
        except NotPlain as error:
            self._refuse(f"step {self.next_version.step} is not committed: {error}")
        finally:
            self.is_changing = self._is_stored = False
            self.copies_next &= self.copies_each
            self._lock.release()

    def _require_kept(self, otherwise: str) -> None:
        """Raise TypeError if a restart could not restore what the commit has made, or the program has set."""
        if why := self._training.unkept_value(durably=self._copies.is_durable) or self._training.refusal():
            self._refuse(f"{otherwise}: {why}")
        self.is_checked = True

    def _refuse(self, why: str) -> NoReturn:
        link.refuse(why)
        raise TypeError(why)

    def require_checked(self) -> None:
        """Check the state that is to be copied: it may have changed since its commit. Raises TypeError."""
        self._require_kept(f"step {self.version.step} is not copied")

    def snapshot(self) -> None:
        """Take a snapshot between two steps. No other thread copies or changes the state meanwhile."""
        self.require_checked()
        try:
            if self._training.is_in_parts:
                # ZeRO-1's step has collectives after the commit has begun.
                self._require_clean(f"step {self.version.step} may be incomplete, and is not kept")
                # This is a collective, so the lock must be free.
                self._copies.snapshot(self.version)
                return
            # Outside the lock: this may wait for a dead node, and the thread that saves the state then needs the lock.
            self._copies.before_snapshot()
            with self._lock:
                if self._is_whole and not self._is_sealed:
                    self._copies.snapshot(self.version)
        except NotPlain as error:
            self._refuse(f"step {self.version.step} is not copied: {error}")

    def finalize(self, *, durably: bool) -> None:
        """At a stop or the end: a snapshot, and a checkpoint. No rank continues before the snapshot is complete."""
        self._training.settings.find_changes()
        self.snapshot()
        with self._lock:
            if self._is_whole and not self._training.is_in_parts:
                self._copies.save_replicated(self.version)
        if durably:
            self._copies.checkpoint(self.version)
        self._copies.wait()

    def give_up(self) -> None:
        """The keeper is left: nothing is copied from now on."""
        self._left.remove()
        with self._lock:
            self._is_whole = False

    def rescue(self) -> None:
        """The group has failed: save the last complete step unless another worker of this node has, and seal the state.

        If the state is in parts, this rank's part of the last copy is in memory already, or is being written: then this
        waits for it, since all parts of a copy count or none. Nothing is saved if there is no memory or no space in it,
        if the state has changed outside of a commit, or if a commit does not end: it waits for a peer that has failed.
        """
        if not self._is_restored:
            return
        # The agent ends this process once all is reported as saved.
        self._copies.wait_for_part(self.version.step)
        if not self._copies.can_rescue:
            return
        # Before the lock is taken: copying a large state takes time, and a step that is being completed is still kept.
        link.saving(self.version.step)
        has_lock = self._acquired()
        self._is_sealed = True
        if not has_lock:
            return
        try:
            is_changed = self._guard.found(self.version.step) or self._training.refusal()
            if self._is_whole and not is_changed:
                self._copies.save_replicated(self.version)
                if self._guard.found(self.version.step):
                    # The training's thread has changed it meanwhile, without a lock.
                    self._copies.discard_replicated(self.version)
        except TypeError as error:
            self._log(f"step {self.version.step} is not copied to memory, and the previous copy counts: {error}")
        finally:
            self._lock.release()
        for warning in (self._guard.warning(self.version.step), self._training.settings.replaced()):
            if warning:
                self._log(warning)

    def _acquired(self) -> bool:
        """Wait for the lock, for a commit only as long as commits take. Returns whether this thread has it."""
        end_s = time.monotonic() + _COMMIT_S + _COMMITS * self._longest_s
        while not self._lock.acquire(timeout=_ARRIVAL_S):
            if self.is_changing and time.monotonic() > end_s:
                return False
        return True

    def peer_failed(self, generation: int) -> int:
        """Save the state in the link's thread: the main thread may be stuck in a collective.

        Returns the newest step that is in memory now, 0 if none is: this step, or the one of an older copy.
        """
        self._catch_up()
        self.group_failed()
        return self._copies.kept_step if self._is_restored else 0

    def group_failed(self) -> None:
        """`rescue` in a thread other than the training's."""
        if self._is_restored:
            self._copies.gpu.bind_thread()
        self.rescue()

    def _catch_up(self) -> None:
        """If another worker of this node has completed the next step, give this worker a moment to complete it too.

        The other worker may be dead, and then its step would be lost.
        """
        end_s = time.monotonic() + _ARRIVAL_S
        while self._is_whole and not self._training.is_in_parts and time.monotonic() < end_s:
            newest = self._copies.newest_done()
            if newest is None or newest <= max(self.version, Version(self._generation, 0)):
                return
            time.sleep(_POLL_S)
