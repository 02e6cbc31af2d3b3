"""What rank 0 leaves behind while training goes on: a line per step, and the checkpoints."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from elaunch.trainer.checkpoint import Checkpoints
from elaunch.trainer.config import TrainConfig
from elaunch.trainer.metrics import Metrics
from elaunch.trainer.place import Place
from elaunch.trainer.progress import Progress
from elaunch.trainer.rundir import RunDirectory


class Recorder:
    """Writes on rank 0 and does nothing elsewhere, so that the loop needs no condition.

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
    ) -> None:
        """Begin after `step`, the last one that the restored checkpoint holds (0: none)."""
        self._config, self._place, self._run, self._progress = config, place, run, progress
        self._metrics = Metrics(run.metrics, restored_step=step) if place.leads else None
        self._checkpoints = checkpoints
        self._lines_lost = False

    def step_done(self, step: int, loss: float, step_s: float) -> None:
        """Note that `step` took `step_s` seconds; `loss` is the mean over its global batch."""
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
