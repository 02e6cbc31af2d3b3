"""The looks: after the same steps all ranks obey requests to stop, and make the copies that are due."""

from __future__ import annotations

import time
from collections.abc import Iterator

from elaunch.trainer.keeper.boundary import Agreed, Boundary, Wants, Wish
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.guarded_state import GuardedState
from elaunch.trainer.keeper.looks import Looks
from elaunch.trainer.keeper.pace import Pace
from elaunch.trainer.keeper.verification import Verification


class LookAround:
    """The looks of one training, from the restored step on. A pace decides when snapshots are due.

    A checkpoint is written every `checkpoint_every` steps; if one is overdue, at the first look. There is a look after
    each multiple of these and of `verify_every`. A process without peers looks after each step.
    """

    def __init__(
        self,
        boundary: Boundary,
        state: GuardedState,
        copies: Copies,
        verification: Verification,
        checkpoint_every: int,
        verify_every: int | None,
    ) -> None:
        self._boundary, self._state, self._copies = boundary, state, copies
        self._verification, self._pace = verification, Pace(copies.snapshot_every, state.version.step)
        self._checkpoint_every, self._total = checkpoint_every, 0
        # The step of the last checkpoint. A failure may have torn the one that was due, and nobody would miss it.
        self._checkpointed = copies.disk.found
        multiples = [checkpoint_every, *([verify_every] if verify_every else [])]
        self._looks = Looks(None if boundary.has_peers else 1, state.version.step, multiples)

    def begin(self, total: int) -> None:
        """A loop up to step `total` begins: what came between it and the loop before is not the time of a step."""
        self._total = total
        self._looks.leave(self._state.version.step, time.monotonic())

    def is_now(self) -> bool:
        """Whether the ranks look at this boundary. To be asked once at each; the same on all ranks."""
        is_agreed = self._looks.reached(self._state.version.step, time.monotonic())
        return is_agreed or self._state.has_failed_copy

    def is_next(self) -> bool:
        """Whether the ranks look after the step that is under way, or their loop ends with it.

        A process that is alone looks after each step, and mostly makes no copy.
        """
        step = self._state.next_version.step
        return 0 < self._total <= step or (self._boundary.has_peers and step >= self._looks.next)

    def look(self) -> Wish:
        """Make what is due. Returns why all ranks stop now instead, if they do. Collective."""
        step = self._state.version.step
        if self._looks.steps:
            self._pace.step_took(self._looks.step_s, self._looks.steps)
        is_due = self._is_due(step)
        snapshot = self._verification.wants_snapshot(self._state, wants=is_due) and self._state.may_be_copied()
        wanted = self._looks.wanted(step, self._due(step, has_snapshot=snapshot, is_refused=is_due and not snapshot))
        agreed = self._ask(wanted, snapshot=snapshot)
        if agreed.wish:
            return agreed.wish
        if agreed.snapshot and step:
            begun_s = time.monotonic()
            self._state.snapshot()
            self._pace.snapshot_took(step, time.monotonic() - begun_s)
            self._state.copies_next |= self._copies.copies_after_snapshot
        self._copies.disk.look()
        if step // self._checkpoint_every > self._checkpointed // self._checkpoint_every:
            self._checkpointed = step
            self._state.require_checked()
            self._copies.checkpoint(self._state.version)
        self._looks.agreed(step, agreed.steps)
        self._looks.leave(step, time.monotonic())
        return Wish.NONE

    def wish(self) -> Wish:
        """Why all ranks stop now, at a place between looks that is the same on all of them. Collective."""
        return self._ask(1, snapshot=False).wish

    def _ask(self, steps: int, *, snapshot: bool) -> Agreed:
        copies = self._copies.steps
        copy = copies.wants(self._state.version.step + 1)
        agreed = self._boundary.agreed(Wants(steps, snapshot, copy, copies.every == 1, self._total))
        self._state.copies_next, self._state.copies_each = agreed.copy, agreed.copies
        self._state.has_failed_copy = False
        return agreed

    def _is_due(self, step: int) -> bool:
        """Whether this rank wants a snapshot. A given distance holds between copies too; else copies are enough."""
        copied = self._copies.copied_step
        if self._pace.is_fixed:
            if copied:
                self._pace.covered(copied)
            return self._pace.is_due(step)
        return not copied and (not self._copies.paces or self._pace.is_due(step))

    def _due(self, step: int, *, has_snapshot: bool, is_refused: bool) -> Iterator[int]:
        """The steps after which this rank has something to do that must not wait for a later look."""
        if self._copies.steps.is_off:
            # There are snapshots at comparisons only, which are after multiples.
            return
        if is_refused:
            yield step + 1
        elif self._copies.paces and self._pace.is_fixed:
            yield self._pace.due_after(step, is_taken=has_snapshot)
        if (next_copy := self._copies.steps.look_after(step)) is not None:
            yield next_copy
