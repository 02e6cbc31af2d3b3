"""Which steps are profiled: what the user asked for, and what a restart makes of it (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

# Steps at the beginning of each start that a count leaves out: memory is allocated, DDP settles the order of its sums,
# the compiler works. The profiler itself warms up in the last of them.
WARM_UP_STEPS = 2
# More makes files that nobody opens: a step of a small model has some thousand events.
STEPS_MAX = 1000


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


@dataclass(frozen=True)
class StepCount:
    """So many steps, as soon as this start of the training is warm."""

    count: int


StepChoice = StepWindow | StepCount


class Before(Enum):
    """What an earlier generation of this job did of what was asked for."""

    NOTHING = "nothing"
    BEGUN = "begun"
    DONE = "done"


@dataclass(frozen=True)
class ProfilePlan:
    """The steps to profile, None for none; `sentence` says why they are other ones than asked for, if they are."""

    window: StepWindow | None
    sentence: str = ""


def parse_steps(text: str) -> StepChoice:
    """`3` is a count, `10-12` are steps. Raises ValueError with a sentence that says what is wrong."""
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})\s*)?", text)
    if not found:
        raise ValueError(f"{text!r} is neither a number of steps nor a range; give 3, or 10-12")
    first, last = int(found[1]), int(found[2]) if found[2] is not None else None
    if last is None:
        if first < 1:
            raise ValueError("0 steps are none; leave it out, or give 3 for three steps")
        return StepCount(_within(first))
    if first < 1:
        raise ValueError(f"{text} begins with step {first}; the first step is 1")
    if last < first:
        raise ValueError(f"{text} ends before it begins; give {last}-{first}")
    _within(last - first + 1)
    return StepWindow(first, last)


def _within(count: int) -> int:
    if count > STEPS_MAX:
        raise ValueError(f"{count} steps are more than the {STEPS_MAX} that one trace may have; give fewer")
    return count


def last_step_needed(choice: StepChoice) -> int:
    """The number of steps that a training from its beginning must have for the choice."""
    return choice.last if isinstance(choice, StepWindow) else WARM_UP_STEPS + choice.count


def plan(choice: StepChoice, next_step: int, before: Before = Before.NOTHING) -> ProfilePlan:
    """The steps to profile in a start whose first step is `next_step`.

    The profiler warms up in the step before the first. If that step is over already, as many steps are profiled as soon
    as possible: a trace of three steps was wanted, and which three matters less.
    """
    if before is Before.DONE:
        return ProfilePlan(None)
    if isinstance(choice, StepCount):
        window = StepWindow(next_step + WARM_UP_STEPS, next_step + WARM_UP_STEPS + choice.count - 1)
        return ProfilePlan(window, f"{_ENDED}: {window} are profiled" if before is Before.BEGUN else "")
    if next_step < choice.first:
        # It may have begun and gone back by some steps: then it begins again, as asked.
        return ProfilePlan(choice, f"{_ENDED}: {choice} are profiled again" if before is Before.BEGUN else "")
    window = StepWindow(next_step + 1, next_step + choice.count)
    if before is Before.BEGUN:
        why = _ENDED
    elif next_step == choice.first:
        why = f"the profiler warms up for one step, and step {next_step} is the first of this start"
    else:
        why = f"step {next_step - 1} was done before this start"
    return ProfilePlan(window, f"{why}: {window} are profiled instead of {choice}")


_ENDED = "an earlier generation ended while steps were profiled, and left no trace"
