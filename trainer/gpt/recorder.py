"""Writes the records of a run during training: rank 0's line per step, every rank's ledger, and progress lines."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.data.order import Micro, Order
from elaunch.trainer.gpt.config import ConfigError, RunDirectory, TrainConfig
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.ledger.ledger import Ledger, audit_folder, next_generation
from elaunch.trainer.parallel.plan import DataShare
from elaunch.trainer.ranks import RankInfo

# What is known of a step, by name; `step` is always there. docs/trainer.md lists the names.
Line: TypeAlias = dict[str, float]
_LINES = 10
# The figures of a step as they are kept on the device, one row per step. NaN stands for what is not known.
FIGURES = ("step", "loss", "grad_norm", "learning_rate", "held_out_loss", "seconds", "world_size", "generation")
# Steps between two readings of the figures: reading a GPU's synchronizes the host with it.
LOG_EVERY = {"cpu": 1, "cuda": 10}
_WHOLE_NUMBERS = ("step", "world_size", "generation")


class Recorder:
    """Writes this rank's records, so that the loop needs no condition. Without a ledger only rank 0 writes.

    Only one of the ranks that share one model has a ledger, by `share`. `state` is part of the training's state:
    the number of samples seen, and the newest steps' figures, so that no line is lost if rank 0 dies before it can
    write it. The figures stay on the device until the log reads them. Use the recorder as a context manager once the
    state is restored; call `begin` first. A full disk does not end the training: one sentence is printed for each
    incomplete file.
    """

    def __init__(
        self,
        config: TrainConfig,
        place: RankInfo,
        run: RunDirectory,
        log: Callable[[str], None],
        device: torch.device,
        *,
        share: DataShare | None = None,
    ) -> None:
        self._config, self._place, self._run, self._log = config, place, run, log
        self._share = share or DataShare(place.rank, place.world_size, leads=True)
        self._device, self._log_every = device, LOG_EVERY[device.type]
        self._metrics: Metrics | None = None
        self._ledger: Ledger | None = None
        # The next step whose line is logged: ten of them over the whole run.
        self._lines_lost, self._shown_next = False, 0
        self._marked_s, self._seconds = 0.0, torch.zeros(())
        # Rank 0's clock at the end of the steps that are not written yet.
        self._at: dict[int, float] = {}
        figures = torch.full((self._log_every, len(FIGURES)), math.nan, dtype=torch.float64, device=device)
        self.state: dict[str, Any] = {"samples_seen": 0, "figures": figures}

    @property
    def loss(self) -> float:
        """The newest step's loss; NaN after a checkpoint that was made without it."""
        return next((line["loss"] for line in reversed(list(self._lines()))), math.nan)

    @property
    def steps_lost(self) -> int:
        """The number of completed steps lost since the run began; only on rank 0."""
        return self._metrics.steps_lost if self._metrics is not None else 0

    def begin(self, keeper: Keeper, order: Order) -> Recorder:
        """Open the files and continue after the step that the keeper has restored. Collective."""
        if self._place.leads:
            done = keeper.step + keeper.repeated
            self._metrics = Metrics(self._run.metrics, keeper.step, done=done)
            self._write_lines()
        self._open_ledger(order, keeper.step)
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
                self._write_lines(durably=True)
            self._metrics.close()
        if self._ledger is not None:
            self._ledger.close()

    def computes(self, step: int, micros: Sequence[Micro]) -> None:
        """Record that this rank computes the gradients of `micros`. Call it before the gradients are summed."""
        for micro in micros:
            self._write_ledger(step, lambda ledger, micro=micro: ledger.record(step, micro))  # type: ignore[misc]

    def mean_loss(self, share_loss: Tensor) -> Tensor:
        """The step's loss, on the device. Each rank passes its part: its losses times `Micro.weight`. Collective."""
        now_s = time.monotonic()
        passed_s, self._marked_s = now_s - self._marked_s, now_s
        summed = self._stacked(share_loss, passed_s)
        dist.all_reduce(summed)
        loss, self._seconds = (summed / self._place.world_size).unbind()
        return loss

    def keep(
        self, step: int, *, loss: Tensor, grad_norm: Tensor, learning_rate: float, held_out: Tensor | None
    ) -> None:
        """Store the step's figures and the samples seen in `state`. Call it within the step's commit."""
        place, held_out_or_nan = self._place, math.nan if held_out is None else held_out
        row = self._stacked(
            step, loss, grad_norm, learning_rate, held_out_or_nan, self._seconds, place.world_size, place.generation
        )
        rows = torch.cat([self.state["figures"].to(self._device), row[None]])
        self.state["figures"] = rows[-self._log_every :]
        self.state["samples_seen"] += self._config.global_batch

    def step_done(self, step: int) -> None:
        """Record `step` as done in all files. Lines are buffered until the log is due."""
        self._write_ledger(step, lambda ledger: ledger.commit(step))
        if self._metrics is None:
            return
        self._at[step] = time.time()
        # The lines first: a restart from the checkpoint that follows never writes them again.
        is_checkpoint = step % self._config.checkpoint_every == 0
        if is_checkpoint or step % self._log_every == 0:
            self._write_lines(durably=is_checkpoint)

    def finish(self, held_out: float, params_sha256: str) -> None:
        """Show the result, and write `result.json`, whose presence makes the run complete."""
        config, place, loss = self._config, self._place, self.loss
        self._log(
            f"done: {config.steps} steps, loss {loss:.3f}, held-out loss {held_out:.3f} nats per byte; {self._run.path}"
        )
        ledger = audit_folder(self._run.ledger, steps=config.steps).text if config.ledger else None
        if ledger is not None:
            self._log(f"ledger: {ledger}")
        self._run.write_result(
            {
                "steps": config.steps,
                "loss": loss,
                "params_sha256": params_sha256,
                "restarts": place.restarts,
                "world_size": place.world_size,
                "held_out_loss": held_out,
                "steps_lost": self.steps_lost,
                # A run that has all its steps has computed each lost one again.
                "steps_repeated": self.steps_lost,
                "samples_seen": self.state["samples_seen"],
                "ledger": ledger,
            }
        )

    def _stacked(self, *values: Tensor | float) -> Tensor:
        """The values as one tensor on the device. It does not wait for them: a number is filled in, not copied."""
        device, kind = self._device, torch.float64
        filled = (v if isinstance(v, Tensor) else torch.full((), v, dtype=kind, device=device) for v in values)
        return torch.stack([value.to(kind) for value in filled])

    def _lines(self) -> Iterator[Line]:
        """The newest steps' lines. Waits for the device."""
        config = self._config
        for row in self.state["figures"].tolist():
            line = {name: value for name, value in zip(FIGURES, row, strict=True) if not math.isnan(value)}
            if "step" not in line:
                continue
            line.update({name: int(line[name]) for name in _WHOLE_NUMBERS})
            line.setdefault("loss", math.nan)
            line["tokens"] = config.global_batch * config.context
            line["tokens_per_s"] = round(line["tokens"] / line["seconds"], 1)
            line["seconds"] = round(line["seconds"], 6)
            yield line

    def _write_lines(self, *, durably: bool = False) -> None:
        """Write the lines of all steps that the file lacks. Also called at the end and at checkpoints."""
        assert self._metrics is not None
        step = 1
        try:
            for line in self._lines():
                step = int(line["step"])
                # The clock is not in the state, since each rank's differs.
                at = self._at.pop(step, None)
                if step <= self._metrics.newest:
                    continue
                if at is not None:
                    self._show(line)
                    line["at"] = round(at, 6)
                self._metrics.append(line)
            if durably:
                self._metrics.sync()
        except OSError as error:
            if not self._lines_lost:
                self._log(f"{self._run.metrics} lacks steps from {step} on: {error.strerror}")
            self._lines_lost = True
            self._at.clear()

    def _show(self, line: Line) -> None:
        """Log a step if its line is due, and a held-out loss."""
        step, steps = int(line["step"]), self._config.steps
        if "held_out_loss" in line:
            self._log(f"held-out loss {line['held_out_loss']:.3f} after step {step - 1}")
        if step >= self._shown_next or step == steps:
            self._log(progress_line(line, steps))
            tenth = max(1, steps // _LINES)
            self._shown_next = (step // tenth + 1) * tenth

    def _open_ledger(self, order: Order, after: int) -> None:
        """Open this rank's file with --ledger, under a generation that no earlier start has used."""
        if not self._config.ledger:
            return
        folder, place = self._run.ledger, self._place
        unused = [next_generation(folder, place.generation) if place.leads else 0]
        dist.broadcast_object_list(unused, device=self._device)
        if not self._share.leads:
            return
        ranks = {"rank": self._share.rank, "world_size": self._share.world_size}
        try:
            self._ledger = Ledger(folder, order, **ranks, generation=unused[0], after=after)
        except OSError as error:
            if after == 0:
                raise ConfigError(f"--ledger cannot be kept in {folder}: {error.strerror}; leave it out") from error
            self._log_ledger_end(after + 1, error)

    def _write_ledger(self, step: int, write: Callable[[Ledger], None]) -> None:
        if self._ledger is None:
            return
        try:
            write(self._ledger)
        except OSError as error:
            self._ledger.close()
            self._ledger = None
            self._log_ledger_end(step, error)

    def _log_ledger_end(self, step: int, error: OSError) -> None:
        # The gap stays: the verdict can only be that steps are missing.
        print(f"rank {self._place.rank}: the ledger ends in step {step}: {error.strerror}", file=sys.stderr, flush=True)


class Metrics:
    """`metrics.jsonl`: one JSON line per step, in order, each step once, continued after the line of `restored_step`.

    Later lines belong to steps that were done and are lost: new lines overwrite them. `done` is the newest step that is
    known to be done, besides those in the file. `steps_lost` counts all lost steps since the run began; a step that is
    lost twice counts twice. Every line contains the count, so that it survives the process. `newest` is the step of the
    last line that counts.
    """

    def __init__(self, path: Path, restored_step: int, *, done: int = 0) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = self.newest = self.steps_lost = 0
        with path.open("rb") as file:
            for row in file:
                record = _record(row)
                if record is None:
                    break
                step, self.steps_lost = int(record["step"]), int(record.get("steps_lost", 0))
                done = max(done, step)
                if step <= restored_step:
                    self._end, self.newest = self._end + len(row), step
        # If this process ends before its first line, the next start counts these steps again.
        self.steps_lost += max(0, done - restored_step)

    def append(self, line: Line) -> None:
        """Add one line. Raises OSError; the next line then replaces what a full disk has taken of this one."""
        content = json.dumps({**line, "steps_lost": self.steps_lost}).encode() + b"\n"
        # Drop lost lines, and half a line of a killed writer or of a full disk.
        os.ftruncate(self._descriptor, self._end)
        if os.pwrite(self._descriptor, content, self._end) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end, self.newest = self._end + len(content), int(line["step"])

    def sync(self) -> None:
        """Make all lines durable. Call it before a checkpoint: a restart from there never writes these lines again."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _record(row: bytes) -> dict[str, Any] | None:
    """The row's values; None for half a row, or one not from `append`."""
    try:
        # Not `parse_json`: a loss may be NaN.
        record = json.loads(row)
        int(record["step"]), int(record.get("steps_lost", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return record if row.endswith(b"\n") and isinstance(record, dict) else None


def progress_line(line: Line, steps: int) -> str:
    """`step 40/120  loss 2.815  norm 0.52  9,400 tokens/s  0:00:24 left`; speeds are those of this step."""
    step = int(line["step"])
    norm = f"  norm {line['grad_norm']:.2f}" if "grad_norm" in line else ""
    left = timedelta(seconds=round((steps - step) * line["seconds"]))
    speed = f"{line['tokens'] / line['seconds']:,.0f} tokens/s"
    return f"step {step}/{steps}  loss {line['loss']:.3f}{norm}  {speed}  {left} left"


def opening(config: TrainConfig, corpus: Corpus, place: RankInfo, run: RunDirectory, parameters: int, step: int) -> str:
    """The log line at the start of a run."""
    many = config.global_batch // config.micro_batch
    workers = f"{place.world_size} worker{'s' * (place.world_size != 1)}"
    sizes = str(config.sizes(place))
    axes = "" if config.parallel in ("ddp", "zero1", sizes) else f" ({sizes})"
    resumed = f"resuming after step {step} of" if step else "training for"
    return (
        f"{resumed} {config.steps} steps: {parameters:,} parameters, {many} × {config.micro_batch} windows of "
        f"{config.context} bytes on {workers} with {config.parallel}{axes}, "
        f"{len(corpus.files):,} files ({corpus.size / 1e6:.1f} MB) below {corpus.root}; run in {run.path}"
    )
