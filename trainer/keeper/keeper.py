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
from types import TracebackType
from typing import Any

from torch import nn

from elaunch.trainer import link
from elaunch.trainer.checkpoint.checkpoints import KEPT
from elaunch.trainer.checkpoint.storage import storage_at
from elaunch.trainer.keeper.boundary import Boundary, Stopped, Wish
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.data_warning import sentence_about_loaders
from elaunch.trainer.keeper.entered_names import entered
from elaunch.trainer.keeper.group_watch import GroupWatch
from elaunch.trainer.keeper.guarded_state import GuardedState
from elaunch.trainer.keeper.last_checkpoint import NotDurable, require_durable
from elaunch.trainer.keeper.look_around import LookAround
from elaunch.trainer.keeper.optimizer_hooks import OptimizerHooks
from elaunch.trainer.keeper.pace import Pace
from elaunch.trainer.keeper.rehearsal import VARIABLE, Rehearsal
from elaunch.trainer.keeper.stop import StopRequest, free_signals
from elaunch.trainer.keeper.verification import Verification
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.state import rng_state
from elaunch.trainer.state.model_state import hook_after_forward, passes_to_final_sums, unwrap
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import cloned


class Keeper:
    """The state of one training: restored on entry, kept while `steps` runs, saved by the survivors of a failure.

    `model` may be wrapped in DDP, and compiled. Several models or optimizers are a list. `scheduler`, `scaler` and
    `extra` are kept too: objects with `state_dict` and `load_state_dict`, lists of them, or for `extra` a dictionary of
    tensors and plain values. They must be the same on every rank, and change only within `commit`. `hook_state` is the
    state of a communication hook (PowerSGD's), which each rank has for itself. `per_rank` is one object, or a list of
    them, with a state that each rank has for itself: `Batches`, a StatefulDataLoader, a `torch.Generator`, anything
    with `state_dict` and `load_state_dict`. `()` says that there is none, and that the data's order needs nothing. Of
    FSDP's and ZeRO-1's state each rank keeps its part.

    `checkpoints` is the directory, or URL, of durable checkpoints: one is written every `checkpoint_every` steps, at a
    stop and at the end, and the newest `keep` stay. `snapshot_every` is the number of steps between copies in memory,
    `copy_every` that of copies of what a rank alone has (a part of the state, or `hook_state`), which stay on its node.
    None measures the cost and keeps it under 1 % of the time. Every `stop_every` steps all ranks look whether to stop;
    None measures the steps, and a request is obeyed within about 0.25 s and one step. Every `verify_every` steps the
    ranks compare what they have alike, and raise Differs if a copy is damaged. `warm_up` does one forward and backward
    pass on any data of the right shape, and is called as often as DDP needs; without it, a resumed run of three or more
    workers is not bit for bit equal to a run without failures. `name` tells several trainings of one program apart.
    `say` takes sentences for people.

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
        snapshot_every: int | None = None,
        copy_every: int | None = None,
        stop_every: int | None = None,
        verify_every: int | None = None,
        warm_up: Callable[[], object] | None = None,
        name: str = "training",
        say: Callable[[str], None] | None = None,
    ) -> None:
        counts = {"checkpoint_every": checkpoint_every, "snapshot_every": snapshot_every, "stop_every": stop_every}
        counts |= {"copy_every": copy_every, "verify_every": verify_every}
        for option, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{option} is {count}; it counts steps and is at least 1")
        if keep < 1:
            raise ValueError(f"keep is {keep}; it counts checkpoints and is at least 1")
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"name is {name!r}; it is part of a file's name: letters, digits, _ and -")
        self._training = Training(model, optimizer, scheduler, scaler, extra, hook_state, per_rank)
        self._place = RankInfo.from_environ(os.environ)
        kept = (model, optimizer, scheduler, scaler, extra, hook_state, per_rank)
        self._rehearsal = Rehearsal(os.environ, self._place, name, kept) if VARIABLE in os.environ else None
        if self._rehearsal is not None:
            checkpoints, checkpoint_every = self._rehearsal.checkpoints(checkpoints, checkpoint_every)
        self._storage = None if checkpoints is None else storage_at(checkpoints)
        self._checkpoint_every, self._snapshot_every, self._stop_every = checkpoint_every, snapshot_every, stop_every
        self._copy_every, self._verify_every, self._keep = copy_every, verify_every, keep
        self._warm_up, self._name, self._say = warm_up, name, say or _to_stderr
        self._pid = os.getpid()
        self._state = GuardedState(self._training, self._place.generation, self._rehearsal)
        self._has_stopped = False
        self._is_entered = self._is_open = False
        self._begun_step = -1
        self._random: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """The last complete step, 0 before the first."""
        return self._state.version.step

    @property
    def snapshot_every(self) -> int:
        """Steps between two snapshots: as given, or as the first rank of this node has measured so far."""
        return self._pace.every

    @property
    def repeated(self) -> int:
        """How many steps were lost and are repeated: workers had completed them, as this job's memory says."""
        return self._copies.repeated

    def __enter__(self) -> Keeper:
        with ExitStack() as stack:
            stack.enter_context(entered(self._name))
            self._peers = Peers()
            self._signals = stack.enter_context(StopRequest(signals=free_signals()))
            self._boundary = Boundary(self._peers, self._signals, self._say)
            self._listener = link.listen(self._boundary.tell, rescue=self._state.peer_failed)
            stack.push(self._listen_no_more)
            link.mark("restoring")
            self._copies = Copies(
                self._training,
                self._peers,
                self._place,
                folder=os.environ.get("ELAUNCH_MEMORY", ""),
                storage=self._storage,
                kept=self._keep,
                name=self._name,
                say=self._say,
                copy_every=self._copy_every,
            )
            self._warm()
            version = self._copies.begin(self._copies.restore())
            self._random = self._training.random.capture()
            self._restored_step = version.step
            self._pace = Pace(self._snapshot_every, version.step)
            self._state.restored(self._copies, version, self._boundary.report, self._say)
            self._verification = Verification(
                self._training, self._peers, self._copies, version, self._verify_every, self._checkpoint_every
            )
            self._around = LookAround(
                self._boundary,
                self._state,
                self._copies,
                self._verification,
                self._pace,
                stop_every=self._stop_every,
                checkpoint_every=self._checkpoint_every,
                verify_every=self._verify_every,
            )
            link.mark("restored")
            # Once for the job: a restart has no time for it.
            is_first = self._peers.leads and not self._place.generation
            if is_first and self._training.per_rank is None and (trap := sentence_about_loaders()):
                self._say(trap)
            stack.enter_context(GroupWatch(self._copies.groups, self._state.group_failed, self._say, tells=is_first))
            for model in self._training.models:
                stack.callback(hook_after_forward(model, self._after_forward).remove)
            if self._rehearsal is not None:
                self._rehearsal.attach(self._training, stack)
            stack.push(self._leave)
            self._stack = stack.pop_all()
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._is_entered = False
        if self._state.is_changing:
            # Hooks began the commit, and no pass has followed.
            try:
                self._state.end(is_whole=error is None)
            except BaseException as failure:
                self._stack.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._stack.__exit__(kind, error, where)

    def restore(self) -> int:
        """Enter the keeper without a `with` block, for loops that belong to others. Returns the last complete step.

        `close` leaves it. If the program ends without `close`, as by an exception that nobody could catch, the last
        complete step is kept in memory then.
        """
        self.__enter__()
        self._is_open = True
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

        After a restore the loop begins with the random states at the end of the restored step. Random numbers that were
        drawn since the Keeper was entered (a DataLoader draws its seed) are drawn again.
        """
        if self.step == self._restored_step:
            self.restore_random()
        self._begun_step = -1
        self._around.begin()
        while self.step < total:
            self.redraw()
            self.step_begin()
            step = self.step + 1
            yield step
            if self.step != step:
                raise RuntimeError(
                    f"step {step} ended without keeper.commit(); wrap optimizer.step() in it, and where a step is to "
                    "change nothing, commit nothing: with keeper.commit(): pass"
                )
        # A stop may have been requested during the last step.
        self._stop_for(self._around.wish())

    def step_begin(self) -> None:
        """The boundary between two steps: if all ranks look here, obeys a request to stop, and makes what is due.

        All ranks call it between two commits, as `steps` does; further calls before the next commit do nothing. The
        first call after a restore also calls `restore_random`, unless that was called before. Raises Stopped.
        """
        if self._random and self.step == self._restored_step:
            self.restore_random()
        if self.step == self._begun_step:
            return
        self._begun_step = self.step
        if self._is_open:
            self._signals.install()
        is_over = self._rehearsal is not None and self._rehearsal.begin(self.step + 1)
        if is_over or self._around.is_now():
            try:
                if is_over:
                    self._end_rehearsal()
                self._stop_for(self._around.look())
            except Stopped as stopped:
                if self._is_open:
                    self.close(stopped)
                raise

    def _end_rehearsal(self) -> None:
        # No rank is gone before all have done the step.
        self._peers.largest([0])
        self._has_stopped = True
        stopped = Stopped(Wish.NONE)
        stopped.code = 0
        raise stopped

    def restore_random(self) -> None:
        """Set the random states to those at the end of the restored step. A loop calls it before it draws again."""
        if self._random:
            rng_state.apply(self._random, self._training.device)
            self._random = {}

    def redraw(self) -> None:
        """Keep the present random states with the last step: random numbers were drawn since (by an evaluation).

        Call it where a run that goes on from that step would not draw them again. `steps` does so before each step.
        """
        if self.step > self._restored_step:
            self._copies.redraw(self._state.version)

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """Everything that changes the state at the end of a step goes into this block, but no collective of yours.

        On a GPU it first waits until the gradients are complete.
        """
        self.commit_begin()
        try:
            yield
        except BaseException:
            self._state.end(is_whole=False)
            raise
        self._state.end()

    @property
    def is_committing(self) -> bool:
        """Whether `commit_begin` was called and `step_end` was not."""
        return self._state.is_changing

    def commit_begin(self) -> None:
        """`commit` for loops that call back: all gradients are there, and the state changes until `step_end`."""
        self._state.begin()

    def step_end(self) -> bool:
        """The step's changes are complete. Returns False if none had begun: gradients were only accumulated."""
        if not self._state.is_changing:
            return False
        self._state.end()
        return True

    def commit_by_hooks(self, module: nn.Module | None = None, *, draws_again: bool = False) -> None:
        """From now on `optimizer.step` commits by itself, and each training forward pass begins a step if one is due.

        `module` is what the loop calls, if that is not `model`. With `draws_again` the loop draws an epoch's order
        again before its first step, and the random states are restored after that. Raises ValueError if hooks cannot
        be right.
        """
        if module is None:
            module = self._training.only_model("commit_by_hooks(module), with the one whose forward pass begins a step")
        hooks = OptimizerHooks(self, self._state, self._training, module, redraws=draws_again)
        self._stack.callback(hooks.remove)
        if not draws_again:
            self.restore_random()

    def _warm(self) -> None:
        """Make DDP sum gradients in its final order. Everything else is restored."""
        before = cloned(self._training.own(large=True))
        if self._warm_up is not None:
            for _ in range(passes_to_final_sums(self._training.models, self._peers.world_size)):
                self._warm_up()
        for model in self._training.models:
            model.zero_grad(set_to_none=True)
        self._training.load_own(before)

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Store this rank's buffers and random states: they belong to the next step, if that step completes."""
        if unwrap(module).training and os.getpid() == self._pid:
            self._copies.put_down(self._state.next_version)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            match error:
                # NotDurable of another keeper: its training has ended, on all ranks at the same place.
                case None | NotDurable():
                    # The training is over, but the program goes on. If it fails later, no step is repeated.
                    if self._rehearsal is not None and self._begun_step != self.step:
                        self._rehearsal.begin(self.step + 1)
                    self._verification.compare(self._state)
                    self._state.put_away(durably=True)
                    require_durable(
                        self._copies,
                        self._state.version,
                        self._say if self._peers.leads else None,
                        lambda: self._stop_for(self._around.wish()),
                    )
                case Stopped():
                    if not self._has_stopped:
                        # Another keeper of this program has stopped, on all ranks at the same place.
                        self._state.put_away(durably=error.wish is not Wish.JOIN)
                case _:
                    try:
                        self._state.rescue()
                    except Exception:
                        # The program's own error is being raised, and must not be replaced by this one.
                        traceback.print_exc()
        finally:
            self._state.give_up()
        # After an error the end of the process closes them. Then the agent hears first which rank has failed.
        if error is None or isinstance(error, Stopped):
            self._copies.close()
            self._peers.close()

    def _listen_no_more(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Stopped):
            self._listener.close()
        else:
            self._listener.drop()

    def _stop_for(self, wish: Wish) -> None:
        """Stop if there is a reason. All ranks call this after the same step, with the same one."""
        if not wish:
            return
        link.stopped(self.step)
        if not self._training.is_in_parts:
            # This gives time to save even if a peer fails meanwhile. Parts would be useless without that peer's.
            link.saving(self.step)
        self._verification.compare(self._state)
        self._state.put_away(durably=wish is not Wish.JOIN)
        self._has_stopped = True
        if self._peers.leads:
            again = self._copies.disk.where_to_go_on(self.step) if wish is not Wish.JOIN else ""
            self._say(f"stopped after step {self.step}, {wish.reason}{again}")
        raise Stopped(wish)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
