"""What is left behind while training goes on: rank 0's line per step and checkpoints, and every rank's ledger."""

from __future__ import annotations

import sys

from torch import nn
from torch.optim import Optimizer

from elaunch.trainer.checkpoint import Checkpoints
from elaunch.trainer.config import TrainConfig
from elaunch.trainer.ledger import Ledger
from elaunch.trainer.metrics import Metrics
from elaunch.trainer.order import Micro
from elaunch.trainer.place import Place
from elaunch.trainer.progress import Progress
from elaunch.trainer.rundir import RunDirectory


class Recorder:
    """Writes what this rank has to write, so that the loop needs no condition: without a ledger only rank 0.

    A disk that takes nothing more does not end the training: one sentence per file that misses something.
    """

    def __init__(
        self,
        config: TrainConfig,
        place: Place,
        run: RunDirectory,
        progress: Progress,
        checkpoints: Checkpoints,
        step: int,
        ledger: Ledger | None,
    ) -> None:
        """Begin after `step`, the last one that the restored checkpoint holds (0: none)."""
        self._config, self._place, self._run, self._progress = config, place, run, progress
        self._metrics = Metrics(run.metrics, restored_step=step) if place.leads else None
        self._checkpoints = checkpoints
        self._lines_lost = False
        self._ledger = ledger

    def computed(self, step: int, micro: Micro) -> None:
        """Note, before the optimizer steps, that this rank has added the gradient of `micro`."""
        if self._ledger is None:
            return
        try:
            self._ledger.record(step, micro)
        except OSError as error:
            self._give_up_ledger(step, error)

    def step_done(self, step: int, loss: float, step_s: float) -> None:
        """Note that `step` took `step_s` seconds; `loss` is the mean over its global batch."""
        if self._ledger is not None:
            try:
                self._ledger.commit(step)
            except OSError as error:
                self._give_up_ledger(step, error)
        if self._metrics is None:
            return
        self._progress.update(step, loss, step_s)
        try:
            self._metrics.append(
                {
                    "step": step,
                    "loss": loss,
                    "tokens": self._config.global_batch * self._config.context,
                    "seconds": round(step_s, 6),
                    "world_size": self._place.world_size,
                    "generation": self._place.generation,
                }
            )
        except OSError as error:
            if not self._lines_lost:
                self._progress.say(f"{self._run.metrics} misses steps from {step} on: {error.strerror}")
            self._lines_lost = True

    def save(self, step: int, loss: float, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin a checkpoint of the state after `step`; where that fails the older ones are still there."""
        if self._metrics is None:
            return
        state = {"step": step, "loss": loss, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        try:
            # First the lines: a restart from this checkpoint never computes their steps again.
            self._metrics.sync()
        except OSError as error:
            self._progress.say(
                f"the checkpoint of step {step} could not be written: {error.strerror}; training goes on"
            )
        else:
            self._checkpoints.save_async(step, state)

    def _give_up_ledger(self, step: int, error: OSError) -> None:
        # Its gap would not close again: the verdict can only be that steps are missing.
        print(f"rank {self._place.rank}: the ledger ends in step {step}: {error.strerror}", file=sys.stderr, flush=True)
        assert self._ledger is not None
        self._ledger.close()
        self._ledger = None
