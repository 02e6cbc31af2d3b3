"""Keeps the state of a training so that a failure costs no step. Any script can use it, around its loop.

with Keeper(model, optimizer, scheduler=scheduler, warm_up=one_dummy_backward) as keeper:
    for step in keeper.steps(10_000):
        … forward, backward …
        with keeper.commit():
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from elaunch.trainer import link
from elaunch.trainer.checkpoint.checkpoints import KEPT
from elaunch.trainer.checkpoint.claim import UNNAMED
from elaunch.trainer.checkpoint.storage import storage_at
from elaunch.trainer.keeper.boundary import EVEN, Boundary, Loops, Stopped, StopReason, StopRequest, SyncPoint
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.disk_copies import NotDurable
from elaunch.trainer.keeper.entry_checks import EntryChecks, entered, is_alone, replaced_options, require_group
from elaunch.trainer.keeper.guarded_state import GroupWatch, GuardedState
from elaunch.trainer.keeper.hooks import OptimizerHooks, hook_backward
from elaunch.trainer.keeper.rehearsal import VARIABLE, Rehearsal
from elaunch.trainer.keeper.verification import Verification
from elaunch.trainer.ranks import RankInfo
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import Version
from elaunch.trainer.state.training_state import Training


class Keeper:
    """The state of one training: restored on entry, kept while `steps` runs, saved by the survivors of a failure.

    `model` may be wrapped in DDP, and compiled. Pass several models or optimizers as a list. `scheduler`, `scaler`
    and `extra` are kept too: objects with `state_dict` and `load_state_dict`, lists of them, or for `extra` a dict
    or list of tensors and plain values, which a restore fills in place. They must be the same on every rank, and change
    only within `commit`. `hook_state` is the state of a communication hook (PowerSGD's), which differs between ranks.
    `per_rank` is one object, or a list of them, whose state differs between ranks: `Batches`, a StatefulDataLoader, a
    `torch.Generator`, anything with `state_dict` and `load_state_dict`. `()` declares that there is none, and that the
    data's order needs nothing. Of FSDP's and ZeRO-1's state each rank keeps its part.

    `checkpoints` is the directory, or URL, of durable checkpoints: one is written every `checkpoint_every` steps, at a
    stop and at the end, and the newest `keep` stay. `lose_at_most` is the number of complete steps that a failure may
    undo while the nodes' memory survives: 0 copies each step within its commit, N copies one in N, and None as many
    as take 0.25 % of the time (1 % where a rank alone has a part). Every `verify_every` steps the ranks compare their
    replicated tensors, and raise Differs if a copy is damaged. `warm_up` does one forward and backward pass on any data
    of the right shape, and is called as often as DDP needs; without it, a resumed run of three or more workers is not
    bit for bit equal to a run without failures.
    `name` distinguishes several training runs of one program. `log` takes log messages.

    All ranks create and enter it, after `init_process_group`; without a process group it keeps a single process.
    Leaving it raises NotDurable if the last checkpoint cannot be written for a minute.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Any = None,
        hook_state: Any = None,
        per_rank: Any = None,
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        keep: int = KEPT,
        lose_at_most: int | None = None,
        verify_every: int | None = None,
        warm_up: Callable[[], object] | None = None,
        name: str = UNNAMED,
        log: Callable[[str], None] | None = None,
        **old: int | None,
    ) -> None:
        lose_at_most = replaced_options(old, lose_at_most)
        counts = {"checkpoint_every": (checkpoint_every, 1), "keep": (keep, 1), "verify_every": (verify_every, 1)}
        for option, (count, least) in {**counts, "lose_at_most": (lose_at_most, 0)}.items():
            if count is None and option in ("verify_every", "lose_at_most"):
                continue
            if not _is_count(count, least):
                raise ValueError(f"{option} is {count!r}; it must be a whole number, at least {least}")
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"name is {name!r}; it is part of a file's name: letters, digits, _ and -")
        self._training = Training(model, optimizer, scheduler, scaler, extra, hook_state, per_rank)
        self._place = RankInfo.from_environ(os.environ)
        self._kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "extra": extra}
        self._kept |= {"hook_state": hook_state, "per_rank": per_rank}
        self._rehearsal = Rehearsal(os.environ, self._place, name, self._kept) if VARIABLE in os.environ else None
        if self._rehearsal is not None:
            checkpoints, checkpoint_every = self._rehearsal.checkpoints(checkpoints, checkpoint_every)
        self._storage = None if checkpoints is None else storage_at(checkpoints)
        self._checkpoint_every, self._verify_every, self._keep = checkpoint_every, verify_every, keep
        self._lose_at_most = lose_at_most
        self._warm_up, self._name, self._log = warm_up, name, log or _to_stderr
        self._pid = os.getpid()
        self._state = GuardedState(self._training, self._place.generation, self._rehearsal)
        self._has_stopped = self._is_entered = self._is_open = False
        self._begun_step = -1
        # The random states at the end of the last complete step, and whether they were restored and not yet set.
        self._random: dict[str, Any] = {}
        self._is_random_due = False
        self._redrawn_step = -1
        # The loop of `steps` that is under way, by the step that it counts up to.
        self._total: int | None = None

    @property
    def step(self) -> int:
        """The last complete step, 0 before the first."""
        return self._state.version.step

    @property
    def repeated(self) -> int:
        """How many steps were lost and are repeated: workers had completed them, as recorded in this job's memory."""
        return self._copies.repeated

    def __enter__(self) -> Keeper:
        with ExitStack() as stack:
            memory, storage = os.environ.get("ELAUNCH_MEMORY", ""), self._storage
            require_group(self._place.world_size, self._name)
            stack.enter_context(entered(self._name, memory, "" if storage is None else str(storage)))
            self._peers = Peers()
            self._signals = stack.enter_context(StopRequest())
            self._boundary = Boundary(self._peers, self._signals, self._log)
            self._listener = link.listen(self._boundary.request, rescue=self._state.peer_failed)
            stack.push(self._close_listener)
            link.mark("restoring")
            self._copies = Copies(
                self._training,
                self._peers,
                self._place,
                folder=memory,
                storage=self._storage,
                kept=self._keep,
                name=self._name,
                log=self._log,
                lose_at_most=self._lose_at_most,
            )
            is_restart = bool(self._place.generation)
            self._loops = Loops(self._copies.loops_path, self._peers, self._log, is_restart=is_restart)
            self._training.warm_up(self._warm_up, self._peers.world_size)
            drawn_before = self._copies.begun_before()
            version = self._copies.begin(self._copies.restore())
            self._random, self._is_random_due = self._training.random.capture(), True
            self._restored_step = version.step
            # Logged once per job, by one rank.
            is_first = self._peers.leads and not is_restart
            self._checks = EntryChecks(
                *(self._training, self._kept, self._peers, Path(memory, f"{self._name}.said") if memory else None),
                log=self._log,
                is_first=not is_restart,
                is_others=self._is_open,
            )
            self._state.restored(self._copies, version, self._boundary.report, self._log)
            every = self._checkpoint_every, self._verify_every
            self._verification = Verification(self._training, self._peers, self._copies, version, *every)
            self._sync = SyncPoint(self._boundary, self._state, self._copies, self._verification, *every)
            link.mark("restored")
            self._state.before_commit, self._state.is_sync_point = self._checks.commit_begins, self._sync.is_next
            self._checks.enter(version.step, drawn_before)
            self._checks.watch(stack, self._state.check_weights, self._state.check_buffers)
            stack.enter_context(GroupWatch(self._copies.groups, self._state.group_failed, self._log, warns=is_first))
            for model in self._training.models:
                stack.callback(hook_backward(model, partial(self._before_sums, model), self._sums_end))
            if self._rehearsal is not None:
                self._rehearsal.attach(self._training, lambda: self.step, stack)
            stack.push(self._leave)
            self._stack = stack.pop_all()
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None and self._total is not None:
            # The loop was left, whatever still refers to its generator.
            self._loops.left(self._total, self.step)
        self._loops.settle(has_left=error is None)
        self._is_entered, self._total = False, None
        if self._state.is_changing:
            # Hooks began the commit, and no pass has followed.
            try:
                self._state.end(is_whole=error is None)
            except BaseException as failure:
                self._stack.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._stack.__exit__(kind, error, where)

    def restore(self) -> int:
        """Enter the keeper without a `with` block, for loops of other libraries. Returns the last complete step.

        `close` leaves it. If the program ends without it, for example after an uncaught exception, the last complete
        step is kept in memory then.
        """
        self._is_open = True
        self.__enter__()
        atexit.register(self._end_of_program)
        return self.step

    def close(self, error: BaseException | None = None) -> None:
        """Leave the keeper after `restore`; `error` ends the training. A second call does nothing."""
        atexit.unregister(self._end_of_program)
        if self._is_entered:
            self.__exit__(type(error), error, None) if error is not None else self.__exit__(None, None, None)

    def _end_of_program(self) -> None:
        if os.getpid() == self._pid:
            self.close(getattr(sys, "last_value", None) or SystemExit(1))

    def steps(self, total: int) -> Iterator[int]:
        """The remaining steps, up to `total`; each must be committed. Ends the process if a stop is requested.

        A step begins with the random states at the end of the step before. What the program draws between a commit and
        the next step (in an evaluation, for a DataLoader's seed) comes from states that only depend on these. A loop
        that was left by `break` has no steps after a restart either. Raises ValueError if an earlier loop has reached
        `total`, or `total` is not a whole number.
        """
        if not _is_count(total, 0):
            raise ValueError(f"steps({total!r}): the total must be a whole number, 0 or more")
        with self.loop(total) as has_steps:
            settings = self._training.settings
            while has_steps and (step := self.step + 1) <= total:
                if self._training.random.aside:
                    self.redraw()
                else:
                    self.keep_draws()
                settings.begin()
                self._total = total
                self.step_begin()
                yield step
                settings.note()
                if self.step != step:
                    raise RuntimeError(
                        f"step {step} ended without keeper.commit(); wrap optimizer.step() in it, and where a step is "
                        "to change nothing, commit nothing: with keeper.commit(): pass"
                    )
        # A stop may have been requested during the last step.
        self._stop_for(self._sync.stop_reason())

    def epochs(self, total: int, steps: int) -> Iterator[tuple[int, Iterator[int]]]:
        """The epochs that are left up to `total`, from 0, each with its steps that are left; an epoch has `steps`.

        The epoch whose last step was complete when the program failed is repeated without steps, for what the
        program does at an epoch's end: it may not have been done.
        """
        if steps < 1:
            raise ValueError(f"an epoch has {steps} steps; it needs at least one: is the loader's dataset empty?")
        with self.loop(total * steps) as has_steps:
            first = max(0, self.step - 1) // steps
            for epoch in range(first, total if has_steps or self.step >= total * steps else first):
                yield epoch, self.steps((epoch + 1) * steps)

    @contextlib.contextmanager
    def loop(self, total: int) -> Iterator[bool]:
        """A loop up to step `total`; yields whether it has steps."""
        has_steps = self._loops.begin(total, self.step)
        self._begun_step = -1
        self._sync.begin(total)
        # An epoch's loop is within that of all epochs.
        self._state.total = max(self._state.total, total)
        if not has_steps and self.step == self._loops.end_of(total):
            self._training.settings.are_the_programs()
        try:
            yield has_steps
        except GeneratorExit:
            if self._is_entered:
                self._loops.left(total, self.step)
            raise
        else:
            self._loops.ended(total, self.step)
        finally:
            self._total = None
            if self._is_entered and not self._state.is_changing:
                self._training.settings.note(is_whole=False)
                if is_alone():
                    # A failure after the loop repeats what follows the loop.
                    self._training.random.step_aside(self._random, self.step)

    def step_begin(self) -> None:
        """The boundary between two steps: at a sync point, stops if requested, and makes what is due.

        All ranks call it between two commits, as `steps` does; further calls before the next commit do nothing. The
        first call after a restore also calls `restore_random`, unless that was called before. Raises Stopped.
        """
        step = self.step
        if step == self._restored_step:
            self.restore_random()
        if step == self._begun_step:
            return
        self._begun_step = step
        if self._total is None:
            self._training.settings.note()
        self._checks.step_begins(step)
        if self._is_open:
            self._signals.install()
        is_over = self._rehearsal is not None and self._rehearsal.begin(step + 1)
        if is_over or self._sync.is_now():
            self._training.require_no_join(EVEN)
            self._checks.sync_point(step)
            try:
                if is_over:
                    # No rank exits before all have done the step.
                    self._peers.all_reduce_max([0])
                    self._has_stopped = True
                    raise Stopped(StopReason.NONE)
                self._stop_for(self._sync.run())
            except Stopped as stopped:
                if self._is_open:
                    self.close(stopped)
                raise

    def restore_random(self) -> None:
        """After a restore, set the random states to those at the end of the restored step, once.

        A loop calls it before it draws again.
        """
        if self._is_random_due:
            self._training.random.apply(self._random)
            self._is_random_due = False

    def redraw(self) -> None:
        """Set the random states back to those at the end of the last step: the next one draws from there.

        Call it after an evaluation that draws random numbers: a run that a failure cuts off there does not repeat
        it, and continues with the same numbers. `steps` does so before each step. After a restore it does nothing
        until `restore_random` has been called.
        """
        if not self._is_random_due or self._training.random.aside:
            self._training.random.apply(self._random)
            self._redrawn_step = self.step

    def redraw_once(self) -> None:
        """Like `redraw`, unless that has been done since the last step."""
        if self._redrawn_step != self.step:
            self.redraw()

    def keep_draws(self) -> None:
        """Keep the present random states with the last step: a run that continues from it does not draw those again."""
        if self.step > self._restored_step:
            self._copies.redraw(self._state.version)
            self._random = self._copies.own.of(self._state.version)["random"]

    def _committed(self) -> None:
        self._random = self._copies.own.of(self._state.version)["random"]
        self._checks.committed(self.step, is_checked=self._state.is_checked)
        self._step_aside(self._state.version)

    def _step_aside(self, version: Version) -> None:
        """What is drawn from here on until the next step depends on the states of `version`, and does not change them.

        Then a rank that dies in the step needs no more than is stored. Draws of several Keepers are indistinguishable.
        """
        if self._total is not None and not self._training.random.aside and is_alone():
            self._training.random.step_aside(self._copies.own.of(version)["random"], version.step)

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """Everything that changes the state at the end of a step goes into this block, but no collective of yours.

        On a GPU it first waits until the gradients are complete.
        """
        self._state.begin()
        try:
            yield
        except BaseException:
            self._state.end(is_whole=False)
            raise
        self._state.end()
        self._committed()

    @property
    def is_committing(self) -> bool:
        """Whether `commit_begin` was called and `step_end` was not."""
        return self._state.is_changing

    def commit_begin(self) -> None:
        """`commit` for loops with callbacks: all gradients are complete, and the state changes until `step_end`."""
        self._state.begin()

    def step_end(self) -> bool:
        """The step's changes are complete. Returns False if none had begun: gradients were only accumulated."""
        if not self._state.is_changing:
            return False
        self._state.end()
        self._committed()
        return True

    def commit_by_hooks(self, module: nn.Module | None = None, *, draws_again: bool = False) -> None:
        """From now on `optimizer.step` commits automatically, and each training forward pass begins a step that is due.

        `module` is what the loop calls, if that is not `model`. With `draws_again` the loop draws an epoch's order
        again before its first step, and the random states are restored after that. Raises ValueError with a scaler, and
        for several models without `module`.
        """
        if module is None:
            if len(self._training.models) > 1:
                raise ValueError(
                    "for several models call commit_by_hooks(module) with the one whose pass begins a step"
                )
            module = self._training.models[0]
        hooks = OptimizerHooks(self, self._state.store, self._training, module, redraws=draws_again)
        self._stack.callback(hooks.remove)
        self._checks.is_others = True
        if not draws_again:
            self.restore_random()

    def _before_sums(self, model: nn.Module) -> None:
        """Store this rank's buffers and random states: they belong to the next step, if that step completes."""
        if os.getpid() == self._pid:
            self._state.backward_begins(model)
            version = self._state.next_version
            self._copies.store(version, unless_same=True, is_begun=True)
            self._checks.drawn(version.step, self._copies.own.of(version))
            self._step_aside(version)

    def _sums_end(self) -> None:
        if os.getpid() == self._pid:
            self._copies.own.store_changed(self._state.next_version)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            match error:
                # NotDurable of another keeper: its training has ended, on all ranks at the same point.
                case None | NotDurable():
                    # The training is over, but the program continues. If it fails later, no step is repeated.
                    if self._rehearsal is not None and self._begun_step != self.step:
                        self._rehearsal.begin(self.step + 1)
                    self._verification.compare(self._state)
                    self._state.finalize(durably=True)
                    self._copies.disk.require_durable(
                        self._state.version,
                        lambda: self._copies.own.of(self._state.version),
                        lambda: self._stop_for(self._sync.stop_reason()),
                    )
                case Stopped():
                    if not self._has_stopped:
                        # Another keeper of this program has stopped, on all ranks at the same point.
                        self._state.finalize(durably=error.reason is not StopReason.JOIN)
                case _:
                    try:
                        self._state.rescue()
                    except Exception:
                        # The program's own error is being raised, and must not be replaced by this one.
                        traceback.print_exc()
        finally:
            self._boundary.flush()
            self._state.give_up()
            self._copies.disk.leave()
        # After an error only the exit of the process closes them, so that its failure is reported first.
        if error is None or isinstance(error, Stopped):
            self._copies.close()
            self._peers.close()

    def _close_listener(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Stopped):
            self._listener.close()
        else:
            self._listener.drop()

    def _stop_for(self, reason: StopReason) -> None:
        """Stop if there is a reason. All ranks call this after the same step, with the same one."""
        if not reason:
            return
        link.stopped(self.step)
        if not self._training.is_in_parts:
            # This gives time to save even if a peer fails meanwhile. Parts would be useless without that peer's.
            link.saving(self.step)
        self._verification.compare(self._state)
        self._state.finalize(durably=reason is not StopReason.JOIN)
        self._has_stopped = True
        if self._peers.leads:
            again = self._copies.disk.where_to_continue(self.step) if reason is not StopReason.JOIN else ""
            self._log(f"stopped after step {self.step}, {reason.text}{again}")
        raise Stopped(reason)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and value >= least  # type: ignore[operator]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
