"""Copies of what each rank alone has, made between snapshots: so a dead worker's part of the state outlives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elaunch.trainer.keeper.sync_schedule import COPY_SHARE, Pace
from elaunch.trainer.memory.sharded import ShardedMemory
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import Version
from elaunch.trainer.state.training_state import Training

if TYPE_CHECKING:
    from elaunch.trainer.keeper.copies import Copies

# The first copies take new memory from the kernel, which takes several times as long.
_FRESH = 4


class StepCopies:
    """Copies of this rank's part of a state in parts, or of the state of its communication hook, in its node's memory.

    `parts` holds the pieces of a state in parts. `every` is the number of steps between two copies; None keeps their
    cost under 1 % of the time. All ranks copy the same steps, and none is sent to another node: snapshots are.
    """

    def __init__(
        self,
        copies: Copies,
        training: Training,
        peers: Peers,
        parts: ShardedMemory | None,
        every: int | None,
        has_records: bool,
        log: Callable[[str], None],
    ) -> None:
        self._copies, self._training, self._peers, self._parts, self._log = copies, training, peers, parts, log
        # Whether there is a state of which each step is copied.
        self._has_any = has_records and (parts is not None or training.has_large)
        self.pace, self._measures = Pace(every, 0, _FRESH, COPY_SHARE), every is None
        # The newest two versions. All ranks have these copies of a communication hook's state.
        self.versions: list[Version] = []
        # Set by `Verification`: then only compared snapshots are taken.
        self.is_off = False
        # Whether a rank could not make the last copy of a hook's state: then no rank tries before the next snapshot.
        self.has_failed = False
        self._copied_s = 0.0
        self._has_logged_pace = False

    @property
    def every(self) -> int:
        """Steps between two copies; 0 if there are none."""
        if self.is_off or self.has_failed or not self._has_any or (self._parts is None and self.pace.every > 1):
            return 0
        return self.pace.every

    def is_ready(self, step: int) -> bool:
        """Whether this rank is ready for a copy of `step`, and one is due."""
        if self.is_off:
            return False
        if self._parts is not None:
            return self._parts.can_copy and self.pace.is_due(step)
        # Survivors have the parameters of this step only, so copies of some steps would be useless.
        return self.every == 1

    def sync_after(self, step: int) -> int | None:
        """After which step the ranks must agree on the next copy, as of `step`; None if it can wait."""
        if self._parts is None or not self._parts.can_copy or self.every <= 1:
            return None
        return self.pace.due_after(step + 1, is_taken=self.pace.is_due(step + 1)) - 1

    def before_commit(self, version: Version) -> bool:
        """Copy the state of a communication hook. The backward pass of that step was the last to change it. Collective.

        Returns False if a rank could not. No rank changes the parameters before all ranks have this copy. So a survivor
        has the parameters that belong to it, or to the previous copy.
        """
        if not self._has_any or self._parts is not None:
            return True
        begun_s = time.monotonic()
        is_kept = self._copies.keep(version) is not None
        took_s = time.monotonic() - begun_s
        lacks, waits = self._peers.all_reduce_max([int(not is_kept), int(not self._copies.has_arrived())])
        self.has_failed = bool(lacks)
        if self.has_failed:
            return False
        if not waits:
            # A survivor saves the parameters of a copied step in place of the older snapshot. If a node dies, its copy
            # of that step is lost, and the newer snapshot counts.
            self._copies.before_snapshot()
        self._has_copied(version, took_s)
        return True

    def after_commit(self, version: Version) -> bool:
        """Copy this rank's part of a state in parts. Collective.

        Returns False if a rank could not. No rank has completed the step before all ranks have this copy. So no step is
        complete that a dead rank lacks.
        """
        if not self._has_any or self._parts is None:
            return True
        begun_s = time.monotonic()
        live = self._training.live() if self._copies.keep(version) is not None else None
        small = self._training.small()
        took_s = time.monotonic() - begun_s
        if not self._parts.copy(version.step, small, live):
            return False
        self._has_copied(version, took_s + self._parts.copy_s)
        return True

    def _has_copied(self, version: Version, took_s: float) -> None:
        now_s = time.monotonic()
        if self.versions:
            self.pace.step_took((now_s - self._copied_s) / (version.step - self.versions[-1].step))
        self._copied_s = now_s
        self.versions = [*self.versions[-1:], version]
        self.pace.snapshot_took(version.step, took_s)
        if self._measures and self.pace.every > 1 and self._peers.leads and not self._has_logged_pace:
            self._has_logged_pace = True
            how = f"every {self.pace.every} steps" if self.every else "at snapshots only"
            self._log(
                f"a copy of what rank 0 alone has takes {1000 * took_s:.1f} ms, so it is made {how}: this costs 1 % of "
                "the time, and a failure goes back to it; Keeper(…, lose_at_most=0) copies each step, and loses none"
            )
