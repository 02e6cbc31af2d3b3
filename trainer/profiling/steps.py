"""Which steps are profiled, and the table of what they show (pure)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elaunch.trainer.profiling.traces import StepTimes

# The version of profile.json. It grows when a field goes or changes its meaning.
SCHEMA = 3
# Steps at the beginning of each start that a count leaves out: memory is allocated, DDP settles the order of its sums,
# the compiler works. The profiler itself warms up in the last of them.
WARM_UP_STEPS = 2
# Rows of the table: the slowest ranks, and those that the others waited for.
_ROWS_MAX = 16
# A rank is named if the others waited for it for this share of a step.
_WAITED = 0.02


@dataclass(frozen=True)
class StepWindow:
    """Steps `first` to `last`, both included; the first step of a training is 1."""

    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"step {self.first}" if self.count == 1 else f"steps {self.first} to {self.last}"


def parse_steps(text: str) -> StepWindow | int:
    """`10-12` are steps, `3` is a number of them in each start. Raises ValueError with what is wrong."""
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})\s*)?", text)
    if not found:
        raise ValueError(f"{text!r} is neither a number of steps nor a range; give 3, or 10-12")
    first, last = int(found[1]), int(found[2] or 0)
    count = first if found[2] is None else last - first + 1
    if count < 1:
        raise ValueError(f"{text} is {count} steps; give at least one")
    if found[2] is None:
        return count
    if first < 2:
        raise ValueError(f"{text} begins with step {first}; the profiler warms up for one step, so begin with 2")
    return StepWindow(first, last)


def last_step_needed(choice: StepWindow | int) -> int:
    """The number of steps that a training from its beginning must have for the choice."""
    return choice.last if isinstance(choice, StepWindow) else WARM_UP_STEPS + choice


def window_of(choice: StepWindow | int, next_step: int) -> StepWindow | None:
    """The steps to profile in a start whose first step is `next_step`: of a range what is left of it, None if nothing.

    The profiler warms up in the step before the first.
    """
    if isinstance(choice, int):
        return StepWindow(next_step + WARM_UP_STEPS, next_step + WARM_UP_STEPS + choice - 1)
    window = StepWindow(max(choice.first, next_step + 1), choice.last)
    return window if window.count > 0 else None


def table(times: Sequence[StepTimes]) -> list[str]:
    """A step's mean on each rank, as lines: a sentence about all, the rows, and the rank that the others waited for."""
    if not times:
        return []
    window = StepWindow(min(each.step for each in times), max(each.step for each in times))
    means = {rank: _mean([each for each in times if each.rank == rank]) for rank in sorted({t.rank for t in times})}
    of_all = _mean(times)
    covered = 1 - of_all["exposed_s"] / of_all["communication_s"] if of_all["communication_s"] else None
    overlap = "" if covered is None else f"; computation covered {covered:.0%} of the communication"
    lines = [f"{window} took {_time(of_all['seconds'])}{' each' * (window.count > 1)}{overlap}"]
    # In a collective the last rank to begin waits for nobody: it communicates least.
    shown = sorted(means, key=lambda rank: means[rank]["communication_s"])[:_ROWS_MAX]
    cells: list[tuple[str, ...]] = [("rank", "step", "computes", "communicates", "exposed")]
    cells += [(str(rank), *map(_time, means[rank].values())) for rank in sorted(shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    last = shown[0]
    waited_s = statistics.median(each["exposed_s"] for each in means.values()) - means[last]["exposed_s"]
    if len(means) > 1 and waited_s > _WAITED * of_all["seconds"]:
        lines.append(f"rank {last} kept the others waiting, for {_time(waited_s)} of each step")
    return lines


def record(times: Sequence[StepTimes], lines: Sequence[str], *, generation: int, on_gpu: bool) -> dict[str, Any]:
    """profile.json: seconds of each step on each rank."""
    of_all = _mean(times) if times else {}
    return {
        "schema": SCHEMA,
        "generation": generation,
        "first_step": min((each.step for each in times), default=0),
        "last_step": max((each.step for each in times), default=0),
        "sentences": list(lines),
        "step_s": of_all.get("seconds"),
        "gpu_busy": of_all["computation_s"] / of_all["seconds"] if of_all and on_gpu else None,
        "steps": [asdict(each) for each in times],
    }


def _mean(times: Sequence[StepTimes]) -> Mapping[str, float]:
    names = ("seconds", "computation_s", "communication_s", "exposed_s")
    return {name: sum(getattr(each, name) for each in times) / len(times) for name in names}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
