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

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from elaunch.trainer import link
from elaunch.trainer.checkpoint.storage import storage_at
from elaunch.trainer.keeper.boundary import Boundary, Stopped, Wish
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.pace import Pace
from elaunch.trainer.keeper.stop import SIGNALS, StopRequest
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.state import rng_state
from elaunch.trainer.state.training_state import Training, cloned
from elaunch.trainer.state.version import Version

# DDP regroups its buckets after the first backward pass, under `static_graph` after the second.
_WARM_UPS = 2
# The agent kills a worker as soon as all of it is saved, and that takes up to `--stop-grace`.
_END_S = 30.0
# If another worker has completed a step, this worker completes it within milliseconds or never.
_ARRIVAL_S = 0.3
_LOOK_S = 0.001
# Seconds before each new try of a last checkpoint that failed.
_AGAIN_S = (1, 2, 4, 8, *(5,) * 9)


class NotDurable(OSError):
    """All steps are done, but every try to write the last checkpoint failed. Raised on all ranks."""


class Keeper:
    """The state of one training: restored on entry, kept while `steps` runs, saved by the survivors of a failure.

    `model` may be wrapped in DDP. `scheduler`, `scaler` and `extra` are kept too: objects with `state_dict` and
    `load_state_dict`, lists of them, or for `extra` a dictionary of tensors and plain values. They must be the same on
    every rank, and change only within `commit`. `hook_state` is the state of a communication hook (PowerSGD's), which
    each rank has for itself. Of FSDP's and ZeRO-1's state each rank keeps its part.

    `checkpoints` is the directory, or URL, of durable checkpoints: one is written every `checkpoint_every` steps, at a
    stop and at the end. `snapshot_every` is the number of steps between copies in memory; None measures the cost of a
    copy and keeps it under 1 % of the time. Every `stop_every` steps all ranks check whether to stop. `warm_up` does
    one forward and backward pass on any data of the right shape; without it, a resumed run of three or more workers is
    not bit for bit equal to a run without failures. `name` tells several trainings of one program apart. `say` takes
    sentences for people.

    All ranks create and enter it, after `init_process_group`; without a process group it keeps a single process.
    Leaving it raises NotDurable if the last checkpoint cannot be written for a minute.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Any = None,
        hook_state: Any = None,
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        snapshot_every: int | None = None,
        stop_every: int = 1,
        warm_up: Callable[[], object] | None = None,
        name: str = "training",
        say: Callable[[str], None] | None = None,
    ) -> None:
        counts = {"checkpoint_every": checkpoint_every, "snapshot_every": snapshot_every, "stop_every": stop_every}
        for option, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{option} is {count}; it counts steps and is at least 1")
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"name is {name!r}; it is part of a file's name: letters, digits, _ and -")
        self._model = model
        self._training = Training(model, optimizer, scheduler, scaler, extra, hook_state)
        self._storage = None if checkpoints is None else storage_at(checkpoints)
        self._checkpoint_every, self._snapshot_every, self._stop_every = checkpoint_every, snapshot_every, stop_every
        self._warm_up, self._name, self._say = warm_up, name, say or _to_stderr
        self._place = RankInfo.from_environ(os.environ)
        self._pid = os.getpid()
        # Held while the state changes or is copied.
        self._lock = threading.Lock()
        self._version = Version(self._place.generation, 0)
        # Whether the state is exactly that of `_version`: neither half restored nor half changed.
        self._is_whole = False
        self._is_sealed = False
        self._has_stopped = False
        self._random: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """The last complete step, 0 before the first."""
        return self._version.step

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
            self._peers = Peers()
            self._boundary = Boundary(self._peers, stack.enter_context(StopRequest(signals=_free_signals())))
            self._listener = link.listen(self._boundary.tell, rescue=self._peer_failed)
            stack.push(self._listen_no_more)
            link.mark("restoring")
            self._copies = Copies(
                self._training,
                self._peers,
                self._place,
                folder=os.environ.get("ELAUNCH_MEMORY", ""),
                storage=self._storage,
                name=self._name,
                say=self._say,
            )
            self._warm()
            self._version = self._copies.begin(self._copies.restore())
            self._random = rng_state.capture(self._training.device)
            self._restored_step = self.step
            self._pace = Pace(self._snapshot_every, self.step)
            with self._lock:
                self._is_whole = True
            link.mark("restored")
            hook = self._model.register_forward_hook(self._after_forward)
            stack.callback(hook.remove)
            stack.push(self._leave)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, where)

    def steps(self, total: int) -> Iterator[int]:
        """The remaining steps, up to `total`; each must be committed. Ends the process if a stop is requested.

        After a restore the loop begins with the random states at the end of the restored step. Random numbers that were
        drawn since the Keeper was entered (a DataLoader draws its seed) are drawn again.
        """
        if self.step == self._restored_step:
            rng_state.apply(self._random, self._training.device)
        self._looked_at_s, self._looked_at_step = time.monotonic(), self.step
        while self.step < total:
            if self.step % self._stop_every == 0:
                self._look_around()
            step = self.step + 1
            yield step
            if self.step != step:
                raise RuntimeError(
                    f"step {step} ended without keeper.commit(); wrap optimizer.step() in it, and where a step is to "
                    "change nothing, commit nothing: with keeper.commit(): pass"
                )
        # A stop may have been requested during the last step.
        self._stop_if_asked(wants_snapshot=False)

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """Everything that changes the state at the end of a step goes into this block, but no collective of yours.

        On a GPU it first waits until the gradients are complete.
        """
        self._copies.gpu.before_commit()
        with self._lock:
            if not self._is_sealed:
                self._is_whole = False
                yield
                self._copies.gpu.after_commit()
                version = Version(self._place.generation, self.step + 1)
                # The forward pass has stored this already, unless random numbers were drawn since.
                self._copies.put_down(version, unless_same=True)
                self._version = version
                self._is_whole = True
                self._copies.done(version)
                link.report(version.step)
                return
        # A peer has failed. The saved state does not include this step, and the agent will kill this process.
        time.sleep(_END_S)
        raise SystemExit(Wish.LEAVE.exit_code)

    def _warm(self) -> None:
        """Make DDP sum gradients in its final order. Everything else is restored."""
        before = cloned(self._training.own(large=True))
        for _ in range(_WARM_UPS if self._warm_up else 0):
            self._warm_up()  # type: ignore[misc]
        self._model.zero_grad(set_to_none=True)
        self._training.load_own(before)

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Store this rank's buffers and random states: they belong to the next step, if that step completes."""
        if module.training and os.getpid() == self._pid:
            self._copies.put_down(Version(self._place.generation, self.step + 1))

    def _look_around(self) -> None:
        """Between two steps: stop if a rank must stop, and make the copies that are due."""
        now_s = time.monotonic()
        if self.step > self._looked_at_step:
            self._pace.step_took((now_s - self._looked_at_s) / (self.step - self._looked_at_step))
        wants_snapshot = not self._copies.paces or self._pace.is_due(self.step)
        if self._stop_if_asked(wants_snapshot=wants_snapshot) and self.step:
            begun_s = time.monotonic()
            self._snapshot()
            self._pace.snapshot_took(self.step, time.monotonic() - begun_s)
        self._copies.look()
        if self.step // self._checkpoint_every > self._looked_at_step // self._checkpoint_every:
            self._copies.checkpoint(self._version)
        self._looked_at_s, self._looked_at_step = time.monotonic(), self.step

    def _stop_if_asked(self, *, wants_snapshot: bool) -> bool:
        """Collective: stop if any rank must stop; else return whether all ranks want a snapshot."""
        wish, snapshot = self._boundary.agreed(wants_snapshot=wants_snapshot)
        if wish:
            self._stop(wish)
        return snapshot

    def _snapshot(self) -> None:
        """Take a snapshot between two steps. No other thread copies or changes the state meanwhile."""
        if self._training.is_in_parts:
            # This is a collective, so the lock must be free.
            self._copies.snapshot(self._version)
            return
        # Outside the lock: this may wait for a dead node, and the thread that saves the state then needs the lock.
        self._copies.before_snapshot()
        with self._lock:
            if self._is_whole and not self._is_sealed:
                self._copies.snapshot(self._version)

    def _put_away(self, *, durably: bool) -> None:
        """At a stop or the end: a snapshot, and a checkpoint. No rank goes on before the snapshot is complete."""
        self._snapshot()
        with self._lock:
            if self._is_whole and not self._training.is_in_parts:
                self._copies.save_replicated(self._version)
        if durably:
            self._copies.checkpoint(self._version)
        self._copies.wait()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            match error:
                # NotDurable of another keeper: its training has ended, on all ranks at the same place.
                case None | NotDurable():
                    # The training is over, but the program goes on. If it fails later, no step is repeated.
                    self._put_away(durably=True)
                    self._require_durable()
                case Stopped():
                    if not self._has_stopped:
                        # Another keeper of this program has stopped, on all ranks at the same place.
                        self._put_away(durably=error.wish is not Wish.JOIN)
                case _:
                    try:
                        self._rescue()
                    except Exception:
                        # The program's own error is being raised, and must not be replaced by this one.
                        traceback.print_exc()
        finally:
            self._peers.part()
            with self._lock:
                self._is_whole = False

    def _require_durable(self) -> None:
        """Retry a failed last checkpoint for a while: a state that is only in memory ends with the job. Collective."""
        for again_s in _AGAIN_S:
            if not self._copies.failure():
                return
            if again_s == _AGAIN_S[0] and self._peers.leads:
                self._say(f"it is the last one: it is tried again for {sum(_AGAIN_S)} s")
            for _ in range(again_s):
                time.sleep(1)
                link.phase("writing the last checkpoint")
                self._stop_if_asked(wants_snapshot=False)
            self._copies.checkpoint(self._version)
            self._copies.wait()
        if why := self._copies.failure():
            raise NotDurable(f"the end of the training is not on the disk: {why}")

    def _listen_no_more(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Stopped):
            self._listener.close()
        else:
            self._listener.drop()

    def _rescue(self) -> None:
        """The group has failed: save the last complete step unless another worker of this node has, and seal the state.

        If the state is in parts, the parts of other ranks are missing, and there is nothing to save.
        """
        if self._training.is_in_parts:
            return
        # Before the lock is taken: copying a large state takes long, and a step that is being completed is still kept.
        link.saving(self.step)
        with self._lock:
            self._is_sealed = True
            if self._is_whole:
                self._copies.save_replicated(self._version)

    def _peer_failed(self, generation: int) -> int:
        """Save the state in the link's thread: the main thread may be stuck in a collective. Returns the saved step."""
        self._catch_up()
        self._rescue()
        return self.step

    def _catch_up(self) -> None:
        """If another worker of this node has completed the next step, give this worker a moment to complete it too.

        The other worker may be dead, and then its step would be lost.
        """
        end_s = time.monotonic() + _ARRIVAL_S
        while self._is_behind() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def _is_behind(self) -> bool:
        newest = self._copies.newest_done() if self._is_whole and not self._training.is_in_parts else None
        return newest is not None and newest > max(self._version, Version(self._place.generation, 0))

    def _stop(self, wish: Wish) -> None:
        """Stop. All ranks call this after the same step."""
        link.stopped(self.step)
        if not self._training.is_in_parts:
            # This gives time to save even if a peer fails meanwhile. Parts would be useless without that peer's.
            link.saving(self.step)
        self._put_away(durably=wish is not Wish.JOIN)
        self._has_stopped = True
        if self._peers.leads:
            again = self._copies.where_to_go_on(self.step) if wish is not Wish.JOIN else ""
            self._say(f"stopped after step {self.step}, {wish.reason}{again}")
        raise Stopped(wish)


def _free_signals() -> list[signal.Signals]:
    """The signals that ask for a stop. SIGUSR1 is one, which schedulers send before they kill, if it has no handler."""
    if threading.current_thread() is not threading.main_thread():
        return []
    free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    return [*SIGNALS, signal.SIGUSR1] if free else [*SIGNALS]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
