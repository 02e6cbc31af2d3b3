"""Writes the records of a run during training: rank 0's line per step, and every rank's ledger."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any

import torch

from elaunch.trainer.data.order import Micro, Order
from elaunch.trainer.gpt.config import ConfigError, TrainConfig
from elaunch.trainer.gpt.metrics import Line, Metrics
from elaunch.trainer.gpt.progress import Progress
from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.ledger.ledger import Ledger, next_generation
from elaunch.trainer.ranks import process_group
from elaunch.trainer.ranks.place import RankInfo


class Recorder:
    """Writes this rank's records, so that the loop needs no condition. Without a ledger only rank 0 writes.

    `state` is part of the training's state: the number of samples seen, and the newest step's line, so that the line is
    not lost if rank 0 dies before it can write it. Use the recorder as a context manager once the state is restored;
    call `begin` first. A full disk does not end the training: one sentence is printed for each incomplete file.
    """

    def __init__(
        self, config: TrainConfig, place: RankInfo, run: RunDirectory, progress: Progress, device: torch.device
    ) -> None:
        self._config, self._place, self._run, self._progress = config, place, run, progress
        self._device = device
        self._metrics: Metrics | None = None
        self._ledger: Ledger | None = None
        self._lines_lost = False
        self._marked_s = self._seconds = 0.0
        self.state: dict[str, Any] = {"samples_seen": 0, "line": None}

    @property
    def loss(self) -> float:
        """The newest step's loss; NaN after a checkpoint that was made without it."""
        line = self.state["line"]
        return float(line["loss"]) if line else math.nan

    @property
    def steps_lost(self) -> int:
        """The number of completed steps that were lost since the run began; only on rank 0."""
        return self._metrics.steps_lost if self._metrics is not None else 0

    def begin(self, keeper: Keeper, order: Order) -> Recorder:
        """Open the files and continue after the step that the keeper has restored. Collective."""
        if self._place.leads:
            line: Line | None = self.state["line"]
            done = keeper.step + keeper.repeated
            self._metrics = Metrics(self._run.metrics, keeper.step, line=line, done=done)
        self._ledger = self._open_ledger(order, keeper.step)
        self._marked_s = time.monotonic()
        return self

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._metrics is not None:
            # Not after a failure: the keeper must save a step first, and the page cache outlives this process.
            if kind is None or issubclass(kind, SystemExit):
                self._sync()
            self._metrics.close()
        if self._ledger is not None:
            self._ledger.close()

    def computes(self, step: int, micro: Micro) -> None:
        """Note that this rank computes the gradient of `micro`. Call it before the gradients are summed."""
        if self._ledger is None:
            return
        try:
            self._ledger.record(step, micro)
        except OSError as error:
            self._give_up_ledger(step, error)

    def mean_loss(self, share_loss: float) -> float:
        """The step's loss. Each rank passes its part: its losses times `Micro.weight`. Collective."""
        now_s = time.monotonic()
        passed_s, self._marked_s = now_s - self._marked_s, now_s
        summed = process_group.sum_over_ranks([share_loss / self._place.world_size, passed_s], self._device)
        self._seconds = round(summed[1] / self._place.world_size, 6)
        return summed[0]

    def keep(self, step: int, loss: float) -> None:
        """Store the step's line and the samples seen in `state`. Call it within the step's commit."""
        self.state["samples_seen"] += self._config.global_batch
        self.state["line"] = Line(
            step=step,
            loss=loss,
            tokens=self._config.global_batch * self._config.context,
            seconds=self._seconds,
            world_size=self._place.world_size,
            generation=self._place.generation,
        )

    def step_done(self, step: int) -> None:
        """Write to all files that `step` is done."""
        if self._ledger is not None:
            try:
                self._ledger.commit(step)
            except OSError as error:
                self._give_up_ledger(step, error)
        if self._metrics is None:
            return
        line: Line = self.state["line"]
        self._progress.update(step, line["loss"], line["seconds"])
        try:
            # Not in the state: each rank's clock differs, and the state is the same on all.
            self._metrics.append(line, at=time.time())
        except OSError as error:
            self._say_lines_lost(step, error)
        if step % self._config.checkpoint_every == 0:
            # The lines first: a restart from the checkpoint that follows never writes them again.
            self._sync()

    def _sync(self) -> None:
        assert self._metrics is not None
        try:
            self._metrics.sync()
        except OSError as error:
            line = self.state["line"]
            self._say_lines_lost(line["step"] if line else 1, error)

    def _say_lines_lost(self, step: int, error: OSError) -> None:
        if not self._lines_lost:
            self._progress.say(f"{self._run.metrics} misses steps from {step} on: {error.strerror}")
        self._lines_lost = True

    def _open_ledger(self, order: Order, step: int) -> Ledger | None:
        """This rank's file, under a generation that no earlier start has used; None without --ledger."""
        if not self._config.ledger:
            return None
        folder, place = self._run.ledger, self._place
        unused = next_generation(folder, place.generation) if place.leads else 0
        generation = int(sum(process_group.sum_over_ranks([unused], self._device)))
        try:
            return Ledger(
                folder, order, rank=place.rank, world_size=place.world_size, generation=generation, after=step
            )
        except OSError as error:
            if step == 0:
                raise ConfigError(f"--ledger cannot be kept in {folder}: {error.strerror}; leave it out") from error
            self._say_ledger_ends(step + 1, error)
            return None

    def _give_up_ledger(self, step: int, error: OSError) -> None:
        assert self._ledger is not None
        self._ledger.close()
        self._ledger = None
        self._say_ledger_ends(step, error)

    def _say_ledger_ends(self, step: int, error: OSError) -> None:
        # The gap stays: the verdict can only be that steps are missing.
        print(f"rank {self._place.rank}: the ledger ends in step {step}: {error.strerror}", file=sys.stderr, flush=True)
