"""Between two steps all ranks obey requests to stop, after the same step, and make the copies that are due.

A loop over the steps that was left by `break` ends at the same step after a restart.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.guarded_state import GuardedState
from elaunch.trainer.keeper.sync_schedule import Pace, SyncSchedule
from elaunch.trainer.keeper.verification import Verification
from elaunch.trainer.ranks.peers import Peers

# A scheduler signals every process of a job, and the agent forwards its own signal: one request may arrive twice.
_SAME_REQUEST_S = 1.0


class StopRequest:
    """Within the `with` block the first signal is only recorded, in `signum` (0 until then).

    Each rank may get the signal in a different step, so no rank acts alone: the ranks agree, and stop together, by
    SystemExit. If the block ends in any other way, the signal is raised again for the handler that is active then.
    After an exception it is raised only if a Python handler gets it: otherwise it would end the process before the
    exception is reported. With several blocks in one program each records the signal: any of them may contain the
    running loop. `clock_s` is the time (monotonic); `end` is how a later signal ends the process.
    """

    # The requests of this process that are inside their blocks and handle signals; the handlers before the first one.
    entered: ClassVar[list[StopRequest]] = []
    before: ClassVar[dict[int, Any]] = {}

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] | None = None,
    ) -> None:
        self.signum, self.pid = 0, os.getpid()
        self._signals, self._noted_s = _free_signals(), 0.0
        self._clock_s, self._end = clock_s, end or self.end_now

    def __enter__(self) -> StopRequest:
        self.install()
        if self._signals:
            self.entered.append(self)
        return self

    def install(self) -> None:
        """Install the handlers, also over those that a library has installed since the block was entered."""
        for number in self._signals:
            handler = signal.signal(number, _note)
            if handler is not _note and self not in self.entered:
                self.before[number] = handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._signals:
            self.entered.remove(self)
        if self.entered:
            # Another block has recorded the signal too, and restores its handler.
            return
        for number in [*self.before]:
            if number in self._signals or signal.getsignal(number) is _note:
                _restore_handler(number)
        if not self.signum or isinstance(error, SystemExit):
            return
        if error is None or callable(signal.getsignal(self.signum)):
            signal.raise_signal(self.signum)

    def note(self, signum: int) -> None:
        now_s = self._clock_s()
        if self.signum and now_s - self._noted_s > _SAME_REQUEST_S:
            self._end(signum)
        elif not self.signum:
            self.signum, self._noted_s = signum, now_s

    def end_now(self, signum: int) -> None:
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(signum)


def _note(signum: int, frame: FrameType | None) -> None:
    entered = [*StopRequest.entered]
    if not entered:
        # A library has restored the handler that it found when it began.
        _restore_handler(signum)
        signal.raise_signal(signum)
    for request in entered:
        if os.getpid() != request.pid:
            # A forked child has inherited this handler, and the signal should end the child.
            request.end_now(signum)
        request.note(signum)


def _restore_handler(signum: int) -> None:
    handler = StopRequest.before.get(signum)
    # None: the handler was not installed by Python.
    signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _free_signals() -> list[signal.Signals]:
    """The signals that request a stop; if unhandled, also SIGUSR1 and SIGUSR2, which schedulers send before SIGKILL."""
    if threading.current_thread() is not threading.main_thread():
        return []
    notices = (signal.SIGUSR1, signal.SIGUSR2)
    unhandled = [notice for notice in notices if signal.getsignal(notice) is signal.SIG_DFL]
    return [signal.SIGTERM, signal.SIGINT, *unhandled]


# The advice to ranks that have different numbers of batches.
EVEN = (
    "give all ranks the same number of batches: next(batches) of Batches(loader) continues with the next epoch, and "
    "DistributedSampler repeats samples, or leaves out the last ones (drop_last=True)"
)


class StopReason(IntEnum):
    """The reason for a stop. If several arrive, the greatest takes precedence."""

    NONE = 0
    JOIN = 1
    LEAVE = 2
    INTERRUPT = 3

    @property
    def exit_code(self) -> int:
        """The exit code of a script that stopped for this reason."""
        return {StopReason.NONE: 0, StopReason.INTERRUPT: 130}.get(self, 143)

    @property
    def text(self) -> str:
        """The reason as the end of a sentence."""
        return {
            StopReason.JOIN: "for nodes that join",
            StopReason.LEAVE: "on a request to leave",
            StopReason.INTERRUPT: "because it was interrupted",
        }[self]


class Stopped(SystemExit):
    """All ranks have stopped after the same step, because of `reason`. The exception ends the script."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.exit_code)
        self.reason = reason


@dataclass(frozen=True)
class SyncPlan:
    """What one rank proposes at a sync point, and then what all ranks have agreed on.

    `steps` is the number of steps until the next sync point, at most. `snapshot`: take one now. `copy`: copy the next
    step. `copies`: copy each step until then. A rank's loop counts up to step `total`. `reason` is why all stop now.
    """

    steps: int = 1
    snapshot: bool = False
    copy: bool = False
    copies: bool = False
    total: int = 0
    reason: StopReason = StopReason.NONE

    def numbers(self, reporter: int) -> list[int]:
        """The numbers that the ranks compare; `reporter` is 0 if this rank has nothing to report.

        The greatest takes precedence: one rank can make all stop or sync soon, and refuse a copy for all.
        """
        total = self.total
        return [self.reason, not self.snapshot, not self.copy, not self.copies, -self.steps, total, -total, reporter]

    @classmethod
    def agreed(cls, numbers: Sequence[int]) -> SyncPlan:
        """From the element-wise maximum of all ranks' `numbers`. Raises ValueError if their loops differ."""
        reason, *refused, steps, most, least, _ = numbers
        if most != -least:
            raise ValueError(
                f"the ranks have different numbers of steps: {-least} on one and {most} on another, and each step of "
                f"the Keeper needs all ranks; {EVEN}"
            )
        snapshot, copy, copies = (not each for each in refused)
        return cls(-steps, snapshot, copy, copies, most, StopReason(reason))


class Boundary:
    """Collects the requests to this rank, from signals and from its agent; `agreed` combines those of all ranks."""

    def __init__(self, peers: Peers, signals: StopRequest, log: Callable[[str], None]) -> None:
        self._peers, self._signals, self._log = peers, signals, log
        self._requested = StopReason.NONE
        self._deferred = ""

    def request(self, reason: str) -> None:
        """The agent requests a stop ("join", "leave", "interrupt"). Called from any thread."""
        requested = {"join": StopReason.JOIN, "interrupt": StopReason.INTERRUPT}.get(reason, StopReason.LEAVE)
        self._requested = max(self._requested, requested)

    def report(self, warning: str) -> None:
        """Log this at the next sync point. If several ranks have a warning there, only the lowest one logs its own."""
        self._deferred = self._deferred or warning

    def flush(self) -> None:
        """There is no further sync point: log what was reported since the last one."""
        if self._deferred:
            self._log(self._deferred)
        self._deferred = ""

    def agreed(self, own: SyncPlan) -> SyncPlan:
        """Agree with all ranks on the plan; `own` is this rank's proposal. Collective: every rank gets the same."""
        order = self._peers.world_size - self._peers.rank
        own = replace(own, reason=max(self._requested, self._noted()))
        numbers = self._peers.all_reduce_max(own.numbers(order if self._deferred else 0))
        if numbers[-1] == order:
            self._log(self._deferred)
        self._deferred = ""
        return SyncPlan.agreed(numbers)

    def _noted(self) -> StopReason:
        return {0: StopReason.NONE, signal.SIGINT: StopReason.INTERRUPT}.get(self._signals.signum, StopReason.LEAVE)


class SyncPoint:
    """The sync points of one training, from the restored step on. A pace decides when snapshots are due.

    A checkpoint is written every `checkpoint_every` steps; if one is overdue, at the first sync point. A sync point
    follows each multiple of these and of `verify_every`.
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
        # The step of the last checkpoint. A failure may have torn the one that was due, which no rank would notice.
        self._checkpointed = copies.disk.found
        multiples = [checkpoint_every, *([verify_every] if verify_every else [])]
        self._schedule = SyncSchedule(state.version.step, multiples)

    def begin(self, total: int) -> None:
        """A loop up to step `total` begins: the time since the loop before is not that of a step."""
        self._total = total
        self._schedule.leave(self._state.version.step, time.monotonic())

    def is_now(self) -> bool:
        """Whether this boundary is a sync point. Call it once at each; the same on all ranks."""
        is_agreed = self._schedule.reached(self._state.version.step, time.monotonic())
        return is_agreed or self._state.has_failed_copy

    def is_next(self) -> bool:
        """Whether the step that is under way ends with a sync point, or ends the loop."""
        step = self._state.next_version.step
        return 0 < self._total <= step or step >= self._schedule.next

    def run(self) -> StopReason:
        """Make the copies that are due. Returns why all ranks stop now instead, if they do. Collective."""
        step = self._state.version.step
        if self._schedule.steps:
            self._pace.step_took(self._schedule.step_s, self._schedule.steps)
        is_due = self._is_due(step)
        snapshot = self._verification.due_snapshot(self._state, is_due=is_due) and self._state.may_be_copied()
        wanted = self._schedule.wanted(step, self._due(step, has_snapshot=snapshot, is_refused=is_due and not snapshot))
        agreed = self._agree(wanted, snapshot=snapshot)
        if agreed.reason:
            return agreed.reason
        if agreed.snapshot and step:
            begun_s = time.monotonic()
            self._state.snapshot()
            self._pace.snapshot_took(step, time.monotonic() - begun_s)
            self._state.copies_next |= self._copies.copies_parts
        self._copies.disk.report_failures()
        if step // self._checkpoint_every > self._checkpointed // self._checkpoint_every:
            self._checkpointed = step
            self._state.require_checked()
            self._copies.checkpoint(self._state.version)
        self._schedule.agreed(step, agreed.steps)
        self._schedule.leave(step, time.monotonic())
        return StopReason.NONE

    def stop_reason(self) -> StopReason:
        """Why all ranks stop now, between two sync points, after the same step on all of them. Collective."""
        return self._agree(1, snapshot=False).reason

    def _agree(self, steps: int, *, snapshot: bool) -> SyncPlan:
        copies = self._copies.steps
        copy = copies.is_ready(self._state.version.step + 1)
        agreed = self._boundary.agreed(SyncPlan(steps, snapshot, copy, copies.every == 1, self._total))
        self._state.copies_next, self._state.copies_each = agreed.copy, agreed.copies
        self._state.has_failed_copy = False
        return agreed

    def _is_due(self, step: int) -> bool:
        """Whether this rank proposes a snapshot. A given interval holds between copies too; else copies are enough."""
        copied = self._copies.copied_step
        if self._pace.is_fixed:
            if copied:
                self._pace.covered(copied)
            return self._pace.is_due(step)
        return not copied and (not self._copies.paces or self._pace.is_due(step))

    def _due(self, step: int, *, has_snapshot: bool, is_refused: bool) -> Iterator[int]:
        """The steps after which this rank has something to do that must not wait for a later sync point."""
        if self._copies.steps.is_off:
            # Snapshots are made at verifications only, which follow multiples.
            return
        if is_refused:
            yield step + 1
        elif self._copies.paces and self._pace.is_fixed:
            yield self._pace.due_after(step, is_taken=has_snapshot)
        if (next_copy := self._copies.steps.sync_after(step)) is not None:
            yield next_copy


class Loops:
    """The loops of this process, each named by the step that it counts up to.

    `path`, in the node's memory, lists the loops that were left, with the step after which each was left; None without
    such a memory. After a restart all ranks create it together.
    """

    def __init__(self, path: Path | None, peers: Peers, log: Callable[[str], object], *, is_restart: bool) -> None:
        self._path, self._leads, self._log = path, peers.leads, log
        self._left: dict[int, int] = {}
        for its in peers.all_gather(self._read()) if is_restart else ():
            self._left |= its
        self._to_leave = dict(self._left)
        # The step that the loops of this process have reached.
        self._reached = -1
        self._is_leaving = False

    def begin(self, total: int, step: int) -> bool:
        """A loop up to `total` begins after `step`. Returns whether it has steps left.

        The first one that an earlier process left has none. Raises ValueError if an earlier loop of this process has
        reached `total`.
        """
        if total <= self._reached:
            raise ValueError(
                f"steps({total}) has nothing to do: an earlier loop of this program has reached step {self._reached}, "
                "and `total` counts the steps of the whole training. Epochs are `for epoch, steps in "
                f"keeper.epochs(how_many, {total}):`, and in it `for step in steps:`"
            )
        self.settle(has_left=True)
        if self._to_leave.pop(total, step + 1) <= step:
            if self._leads:
                self._log(f"the loop up to step {total} ends after step {self._left[total]}, where it was left before")
            return False
        if step < total and self._left.pop(total, None) is not None:
            self._write()
        return step < total

    def end_of(self, total: int) -> int:
        """The step after which the loop up to `total` ends."""
        return self._left.get(total, total)

    def ended(self, total: int, step: int) -> None:
        """The loop up to `total` is at its end, after `step`."""
        if step >= total:
            self._reached = max(self._reached, total)

    def left(self, total: int, step: int) -> None:
        """The loop up to `total` was left after `step`, by `break`, `return` or an exception: `settle` decides which.

        An exception closes a generator as `break` does, so nothing is written before.
        """
        self._left[total], self._is_leaving = step, True

    def settle(self, *, has_left: bool) -> None:
        """Record the loop that was left last, once the program is past it; without `has_left` an exception ended it."""
        if self._is_leaving and has_left:
            self._write()
        self._is_leaving = False

    def _read(self) -> dict[int, int]:
        with contextlib.suppress(OSError, ValueError):
            if self._path is not None:
                return {int(total): step for total, step in json.loads(self._path.read_text()).items()}
        return {}

    def _write(self) -> None:
        # Without space for so little there is no state to restore either.
        with contextlib.suppress(OSError):
            if self._path is not None:
                new = self._path.with_name(f"{self._path.name}-{os.getpid()}")
                new.write_text(json.dumps(self._left))
                new.replace(self._path)
