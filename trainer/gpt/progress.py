"""The progress of a run, for people: ten lines over the run, and what else happens."""

from __future__ import annotations

from datetime import timedelta
from typing import TextIO, TypeAlias

from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.ranks.place import RankInfo

# What is known of a step, by name; `step` is always there. docs/trainer.md lists the names.
Line: TypeAlias = dict[str, float]
_LINES = 10


class Progress:
    """Writes to `stream` after each step if this rank `speaks`."""

    def __init__(self, stream: TextIO, *, steps: int, speaks: bool = True) -> None:
        self._stream, self._steps, self._speaks = stream, steps, speaks
        self._next = 0

    def update(self, line: Line) -> None:
        """Show a step: ten of them over the whole run, and those with a held-out loss."""
        step = int(line["step"])
        if "held_out_loss" in line:
            self.say(f"held-out loss {line['held_out_loss']:.3f} after step {step - 1}")
        if step >= self._next or step == self._steps:
            self.say(progress_line(line, self._steps))
            tenth = max(1, self._steps // _LINES)
            self._next = (step // tenth + 1) * tenth

    def say(self, sentence: str) -> None:
        """Write a sentence on a line of its own."""
        if self._speaks:
            print(sentence, file=self._stream, flush=True)


def progress_line(line: Line, steps: int) -> str:
    """`step 40/120  loss 2.815  norm 0.52  9,400 tokens/s  0:00:24 left`; speeds are those of this step."""
    step = int(line["step"])
    norm = f"  norm {line['grad_norm']:.2f}" if "grad_norm" in line else ""
    left = timedelta(seconds=round((steps - step) * line["seconds"]))
    speed = f"{line['tokens'] / line['seconds']:,.0f} tokens/s"
    return f"step {step}/{steps}  loss {line['loss']:.3f}{norm}  {speed}  {left} left"


def opening(config: TrainConfig, corpus: Corpus, place: RankInfo, run: RunDirectory, parameters: int, step: int) -> str:
    """What is about to happen, in one sentence."""
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
