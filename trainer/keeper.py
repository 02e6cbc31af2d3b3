"""Keeps the state of a training, so that a failure costs no step: in any script, around its loop.

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
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from elaunch.trainer import link, randomness
from elaunch.trainer.boundary import Boundary, Wish
from elaunch.trainer.checkpoint import Checkpoints
from elaunch.trainer.exchange import Version, repeated, sentence
from elaunch.trainer.gpu import GpuCopies, HostCopies
from elaunch.trainer.marks import marks
from elaunch.trainer.memory import Memory, NoRoom
from elaunch.trainer.pace import Pace
from elaunch.trainer.packing import NotPlain
from elaunch.trainer.peers import Peers
from elaunch.trainer.place import Place
from elaunch.trainer.restore import Shelf, agree, take_over
from elaunch.trainer.stop import SIGNALS, StopRequest
from elaunch.trainer.training import Training, cloned

# DDP regroups its buckets after the first backward pass, under `static_graph` after the second.
_WARM_UPS = 2
# The agent kills a worker whose group has failed much sooner.
_END_S = 30.0
# A step that another worker has completed is a matter of milliseconds here, or will not arrive at all.
_ARRIVAL_S = 0.3
_LOOK_S = 0.001


class Keeper:
    """The state of one training: restored on entry, kept while `steps` runs, saved by who survives a failure.

    `model` may be wrapped in DDP. `scheduler`, `scaler` and `extra` are kept too: objects with `state_dict` and
    `load_state_dict`, lists of them, or for `extra` a dictionary of tensors and plain values; all of them the same on
    every rank, and changed only within `commit`. `hook_state` is the state of a communication hook (PowerSGD's), of
    which every rank has its own.

    `checkpoints` is the directory of durable checkpoints: one every `checkpoint_every` steps, at a stop and at the
    end. `snapshot_every` is the number of steps between copies in memory; None measures what one costs and stays under
    1 % of the time. All ranks look every `stop_every` steps whether to stop. `warm_up` does one forward and backward
    pass on anything of the right shape; without it a resumed run of three or more workers is not bit for bit the
    unfailed one. `name` tells several trainings of one program apart. `say` takes sentences for people.

    Made and entered by all ranks, after `init_process_group` (without which it keeps a single process).
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
        self._model = model
        self._training = Training(model, optimizer, scheduler, scaler, extra, hook_state)
        self._directory = None if checkpoints is None else Path(checkpoints)
        self._checkpoint_every, self._snapshot_every, self._stop_every = checkpoint_every, snapshot_every, stop_every
        self._warm_up, self._name, self._say = warm_up, name, say or _to_stderr
        self._place = Place.from_environ(os.environ)
        self._pid = os.getpid()
        # Held while the state changes or is copied.
        self._lock = threading.Lock()
        self._version = Version(self._place.generation, 0)
        # Whether the state is that of `_version`: neither half restored nor half changed.
        self._is_whole = False
        self._is_sealed = False
        self._has_stopped = False
        self._copies = GpuCopies(self._training.device) if self._training.device.type == "cuda" else HostCopies()
        self._random: dict[str, Any] = {}
        self._put: tuple[object, dict[str, Any]] = (None, {})

    @property
    def step(self) -> int:
        """The last step that is complete, 0 before the first."""
        return self._version.step

    def __enter__(self) -> Keeper:
        with ExitStack() as stack:
            self._peers = Peers()
            self._boundary = Boundary(self._peers, stack.enter_context(StopRequest(signals=_free_signals())))
            link.listen(self._boundary.tell, self._peer_failed)
            self._shelf = self._find_shelf()
            self._checkpoints = None
            if self._directory is not None:
                self._checkpoints = Checkpoints(
                    self._directory, generation=self._place.generation, say=self._say, group=self._peers.group
                )
            self._restore()
            self._records = None if self._shelf is None else self._shelf.records(self._peers.rank)
            self._begin()
            hook = self._model.register_forward_hook(self._after_forward)
            stack.callback(hook.remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self._keep_last()
            elif not self._has_stopped:
                self._rescue()
            with self._lock:
                self._is_whole = False

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left, up to `total`; each must be committed. Ends the process where a stop is asked for.

        The loop begins with the random states that the step before it ended with: what was drawn since the Keeper was
        entered (a DataLoader draws its seed) is drawn again.
        """
        randomness.apply(self._random, self._training.device)
        self._looked_at_s, self._looked_at_step = time.monotonic(), self.step
        while self.step < total:
            if self.step % self._stop_every == 0:
                self._look_around()
            step = self.step + 1
            yield step
            if self.step != step:
                raise RuntimeError(f"step {step} ended without keeper.commit(); wrap optimizer.step() in it")

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """Everything that changes the state at a step's end happens within, and no collective of your own does.

        On a GPU it waits first until the gradients are there.
        """
        self._copies.before_commit()
        with self._lock:
            if not self._is_sealed:
                self._is_whole = False
                yield
                self._copies.after_commit()
                version = Version(self._place.generation, self.step + 1)
                # Mostly it is there since the forward pass; unless something has been drawn meanwhile.
                self._put_down(version, unless_same=True)
                self._version = version
                self._is_whole = True
                if self._records is not None:
                    self._records.done(version)
                link.report(version.step)
                return
        # A peer has failed, what is kept is without this step, and the agent is about to kill this process.
        time.sleep(_END_S)
        raise SystemExit(Wish.LEAVE.exit_code)

    def _find_shelf(self) -> Shelf | None:
        folder = os.environ.get("ELAUNCH_MEMORY")
        if not folder:
            return None
        layout = self._training.layout()
        memory = Memory(Path(folder), self._name, layout)
        return Shelf(memory, self._name, layout, speaks=self._place.local_rank == 0, say=self._say)

    def _restore(self) -> None:
        """Warm up, and put the newest state that is anywhere into the objects."""
        before = cloned(self._training.own(large=True))
        for _ in range(_WARM_UPS if self._warm_up else 0):
            self._warm_up()  # type: ignore[misc]
        self._model.zero_grad(set_to_none=True)
        self._training.load_own(before)

        decision, inventories = agree(self._shelf, self._peers, large=self._training.has_large)
        completed = max((i.completed for i in inventories if i.completed is not None), default=None)
        in_memory = -1 if decision is None else decision.version.step
        done = 0 if completed is None else completed.step
        if self._restore_from_disk(newer_than=in_memory, done=done):
            return
        if decision is not None:
            take_over(decision, inventories, self._shelf, self._peers, self._training)
            self._version = decision.version
            self._tell(sentence(decision))
        elif self._place.generation:
            self._tell(f"there is no state to restore: training begins at step 1; {repeated(done)}")

    def _restore_from_disk(self, *, newer_than: int, done: int) -> bool:
        if self._checkpoints is None or self._directory is None:
            return False
        newest = max((mark.step for mark in marks(self._directory)), default=-1) if self._peers.leads else -1
        if self._peers.from_rank_0(newest) <= newer_than:
            return False
        state: dict[str, Any] = {}
        mark = self._checkpoints.load_newest(state)
        # It may be an older one, where the newest was torn.
        if mark is None or mark.step <= newer_than:
            return False
        # The buffers are rank 0's, as those that DDP broadcasts.
        self._training.load_own({"buffers": state["buffers"]}, only_buffers=True)
        self._training.load_replicated(state["replicated"])
        if len(state["random"]) == self._peers.world_size:
            randomness.apply(state["random"][self._peers.rank], self._training.device)
        self._version = Version(self._place.generation, mark.step)
        lost = repeated(max(0, done - mark.step))
        self._tell(f"restored step {mark.step} from the checkpoint in {self._directory}; {lost}")
        return True

    def _begin(self) -> None:
        """From here on there is a state that can be saved."""
        self._random = randomness.capture(self._training.device)
        self._pace = Pace(self._snapshot_every, self.step)
        self._put_down(self._version)
        if self._records is not None:
            self._records.done(Version(self._place.generation, self.step))
        with self._lock:
            self._is_whole = True

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """This rank's buffers and random states are those of the next step, if it gets that far."""
        if module.training and os.getpid() == self._pid:
            self._put_down(Version(self._place.generation, self.step + 1))

    def _put_down(self, version: Version, *, unless_same: bool = False) -> None:
        """Have this rank's own state in memory as that of `version`."""
        if self._records is None:
            return
        own = self._training.own()
        stamp = (version, [(buffer.data_ptr(), buffer._version) for buffer in own["buffers"].values()])
        if unless_same and stamp == self._put[0] and randomness.same(own["random"], self._put[1]):
            return
        self._put = (stamp, own["random"])
        try:
            self._records.stage(version, own)
        except OSError as error:
            self._records = None
            self._say(f"rank {self._peers.rank} keeps no buffers and random states in memory: {error.strerror}")

    def _look_around(self) -> None:
        """Between two steps: does anybody want to stop, is it time for a copy?"""
        now_s = time.monotonic()
        if self.step > self._looked_at_step:
            self._pace.step_took((now_s - self._looked_at_s) / (self.step - self._looked_at_step))
        refuses = self._shelf is not None and self._shelf.speaks and not self._pace.is_due(self.step)
        wish, snapshot = self._boundary.agreed(wants_snapshot=not refuses)
        if wish:
            self._stop(wish)
        if snapshot and self._shelf is not None and self.step:
            self._snapshot()
        if self._checkpoints is not None and self.step and self.step % self._checkpoint_every == 0:
            self._checkpoint()
        self._looked_at_s, self._looked_at_step = time.monotonic(), self.step

    def _snapshot(self) -> None:
        """Copy the state to this node's memory; what it took sets the pace."""
        begun_s = time.monotonic()
        self._save()
        if self._records is not None:
            with contextlib.suppress(OSError):
                self._records.keep(self._version, self._training.own(large=True))
        self._pace.snapshot_took(self.step, time.monotonic() - begun_s)

    def _save(self, *, only_speaker: bool = True) -> None:
        """Have the state in this node's memory, if there is one and the state is whole."""
        shelf = self._shelf
        if shelf is None or (only_speaker and not shelf.speaks):
            return
        with self._lock:
            if self._is_whole:
                try:
                    shelf.memory.save(self._version, self._training.replicated, self._copies.copy)
                except NoRoom as error:
                    self._shelf = None
                    self._say(str(error))
                except (OSError, NotPlain) as error:
                    self._say(f"step {self.step} could not be copied to {shelf.memory.folder}: {error}")

    def _rescue(self) -> None:
        """The group has failed: save the last complete step, unless another worker of this node has; change no more."""
        with self._lock:
            self._is_sealed = True
        self._save(only_speaker=False)
        link.saved(self.step)

    def _peer_failed(self, generation: int) -> None:
        """In the link's thread: the main one may be stuck in a collective for minutes."""
        if generation == self._place.generation:
            self._catch_up()
            self._rescue()

    def _catch_up(self) -> None:
        """Another worker of this node has completed the step that is on its way here: let it arrive, if it can.

        That one may be dead, and it were a step lost.
        """
        end_s = time.monotonic() + _ARRIVAL_S
        while self._is_behind() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def _is_behind(self) -> bool:
        shelf = self._shelf
        newest = None if shelf is None or not self._is_whole else shelf.completed()
        return newest is not None and newest > max(self._version, Version(self._place.generation, 0))

    def _stop(self, wish: Wish) -> None:
        """All ranks are here, after the same step."""
        link.stopped(self.step)
        self._save()
        if wish is not Wish.JOIN:
            self._checkpoint()
        if self._checkpoints is not None:
            self._checkpoints.wait()
        self._has_stopped = True
        self._tell(f"stopped after step {self.step}, {wish.reason}")
        raise SystemExit(wish.exit_code)

    def _keep_last(self) -> None:
        """The training is over, the program is not: if it fails now, nothing is repeated."""
        self._save()
        self._checkpoint()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _checkpoint(self) -> None:
        if self._checkpoints is None or not self.step:
            return
        random = self._peers.from_all(randomness.capture(self._training.device))
        replicated, buffers = self._training.replicated(), self._training.buffers()
        self._checkpoints.save_async(self.step, {"replicated": replicated, "buffers": buffers, "random": random})

    def _tell(self, text: str) -> None:
        if self._peers.rank == 0:
            self._say(text)


def _free_signals() -> list[signal.Signals]:
    """Those that ask for a stop; SIGUSR1, which schedulers send some time before they kill, if nobody else takes it."""
    if threading.current_thread() is not threading.main_thread():
        return []
    free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    return [*SIGNALS, signal.SIGUSR1] if free else [*SIGNALS]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
