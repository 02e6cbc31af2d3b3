"""How `--parallel auto` chooses: which plans are measured, which one is taken, and the table that says so. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elaunch.trainer.parallel.candidates import Candidate
from elaunch.trainer.parallel.estimate import Estimate

# So many plans are measured. If none of them fits then, one more at a time.
MEASURED = 3
# After so many seconds of compiling no further plan is measured, if one fits.
COMPILING_ENOUGH_S = 60.0
# An estimate of a step's memory may be too low by this share of it.
_MARGIN = 0.25
# A plainer plan is taken if it takes at most so many times as long: two measurements differ by more.
_AS_FAST = 1.03
# Rejected plans that the table shows besides the measured ones.
_SHOWN = 3
_GIB = 1 << 30


@dataclass(frozen=True)
class StepMemory:
    """What a step took when the plan was chosen, beside its estimate then. Bytes of one worker."""

    estimated: int
    measured: int

    def corrected(self, estimated: int) -> int:
        """What a step takes that has this estimate with other workers.

        What the estimate does not know (a compiler's own memory) stays as large as it was. Only the difference of the
        estimates may be too low.
        """
        unknown = max(0, self.measured - self.estimated)
        return estimated + unknown + int(_MARGIN * max(0, estimated - self.estimated))


@dataclass(frozen=True)
class PlanOption:
    """A candidate and what it is estimated to take. `known` corrects the memory, where the plan ran before."""

    candidate: Candidate
    estimate: Estimate
    known: StepMemory | None = None

    @property
    def text(self) -> str:
        return self.candidate.text

    @property
    def needs(self) -> int:
        """The memory without which it is not tried."""
        memory = self.estimate.memory
        if self.known is not None:
            return self.needs_with(max(self.known.corrected(memory.step), memory.ending))
        return self.needs_with(int(max(memory.step, memory.ending) * (1 + _MARGIN)))

    def needs_with(self, taken: int) -> int:
        """What the worker needs if the training itself takes so much."""
        return self.estimate.memory.base + self.estimate.memory.copies + taken


@dataclass(frozen=True)
class PlanTrial:
    """What a plan took in a few steps: the most memory, and of the fastest step the slowest worker's seconds.

    `left` is memory that earlier trials have not given back. The training has it too. `compiling_s` is in no step.
    """

    memory: int
    step_s: float
    left: int = 0
    compiling_s: float = 0.0


@dataclass(frozen=True)
class PlanRoom:
    """What one worker may take, and in words what limits it."""

    bytes: int
    where: str


@dataclass(frozen=True)
class PlanChoice:
    """The option that was taken, and what was measured, by the plans' texts."""

    option: PlanOption
    trials: dict[str, PlanTrial]

    @property
    def compiling_s(self) -> float:
        return _compiling_s(self.trials)


class NothingFits(Exception):
    """No plan fits into the memory: a sentence with the values and the way out."""


def choose(options: Sequence[PlanOption], room: PlanRoom, measure: Callable[[PlanOption], PlanTrial]) -> PlanChoice:
    """Measure the plainest that fits and those estimated fastest, and take the fastest measured. Raises NothingFits.

    `options` begin with the plainest. All workers call this with the same values and get the same choice.
    """
    waiting = to_measure(options, room)
    # Whatever the estimates are worth, the choice is not slower than this one.
    waiting = sorted(waiting, key=lambda each: each is not min(waiting, key=options.index))
    trials: dict[str, PlanTrial] = {}
    measured: list[PlanOption] = []
    while waiting and not (measured and (len(trials) >= MEASURED or _compiling_s(trials) >= COMPILING_ENOUGH_S)):
        option = waiting.pop(0)
        trial = trials[option.text] = measure(option)
        if fits_as_measured(option, trial, room):
            measured.append(option)
    if not measured:
        raise NothingFits(refusal(options, room))
    best_s = min(trials[each.text].step_s for each in measured)
    plainest_first = sorted(measured, key=options.index)
    return PlanChoice(next(each for each in plainest_first if trials[each.text].step_s <= _AS_FAST * best_s), trials)


def _compiling_s(trials: Mapping[str, PlanTrial]) -> float:
    """The seconds that compiling took in all of them."""
    return sum(trial.compiling_s for trial in trials.values())


def choose_by_estimate(options: Sequence[PlanOption], room: PlanRoom) -> PlanOption:
    """The option that is estimated to be the fastest. Raises NothingFits."""
    if not (fitting := to_measure(options, room)):
        raise NothingFits(refusal(options, room))
    return fitting[0]


def to_measure(options: Sequence[PlanOption], room: PlanRoom) -> list[PlanOption]:
    """Those that fit, by their estimated time, and of those that only differ in the order of computation the first."""
    fitting = [each for each in options if each.needs <= room.bytes]
    found: dict[tuple[str, int, int], PlanOption] = {}
    for option in sorted(fitting, key=lambda each: (each.estimate.duration.total, each.needs)):
        found.setdefault(option.candidate.plan.form, option)
    return list(found.values())


def fits_as_measured(option: PlanOption, trial: PlanTrial, room: PlanRoom) -> bool:
    """Whether the whole run fits, and not only the steps that were measured."""
    return needs_as_measured(option, trial) <= room.bytes


def needs_as_measured(option: PlanOption, trial: PlanTrial) -> int:
    """What a worker needs for the whole run."""
    return option.needs_with(trial.left + max(trial.memory, option.estimate.memory.ending))


def refusal(options: Sequence[PlanOption], room: PlanRoom) -> str:
    """Why nothing can be chosen, and the way out."""
    least = min(options, key=lambda each: each.needs)
    memory = least.estimate.memory
    parts = {"the process itself": memory.base, "copies of the state": memory.copies}
    of_which = ", ".join(f"{gib(size)} GiB {what}" for what, size in parts.items() if size)
    return (
        f"--parallel auto: no plan fits. The smallest is {least.text}: it needs {gib(least.needs)} GiB for each worker"
        f"{f' (of which {of_which})' if of_which else ''}, and a worker may take {gib(room.bytes)} GiB: {room.where}; "
        "give the job more memory, or use fewer workers on a node, a smaller --micro-batch or a smaller network"
    )


def table(choice: PlanChoice, options: Sequence[PlanOption], room: PlanRoom) -> list[str]:
    """Lines for people: the estimates beside what was measured, and why each plan was taken or left."""
    shown = [each for each in options if each.text in choice.trials]
    shown.sort(key=lambda each: (each.text != choice.option.text, choice.trials[each.text].step_s))
    too_large = [each for each in options if each.needs > room.bytes]
    # By the estimate these are the ones that would be chosen if there were more memory.
    shown += sorted(too_large, key=lambda each: each.estimate.duration.total)[:_SHOWN]
    cells: list[tuple[str, ...]] = [("plan", "memory: estimate", "measured", "step: estimate", "measured", "")]
    cells += [_row(each, choice, room) for each in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    left = len(options) - len(shown)
    if left:
        lines.append(f"{left} more plan{'s' * (left != 1)} not measured")
    if choice.compiling_s:
        is_early = len(choice.trials) < MEASURED and choice.compiling_s >= COMPILING_ENOUGH_S
        so = "; so no further plan was measured" if is_early else ""
        lines.append(f"the plans were compiled, which took {_seconds(choice.compiling_s)} beside their steps{so}")
    return lines


def rows(choice: PlanChoice, options: Sequence[PlanOption]) -> list[dict[str, Any]]:
    """The same for programs, of all options: bytes of a worker, and seconds. What was not measured is None."""

    def row(option: PlanOption) -> dict[str, Any]:
        memory, trial = option.estimate.memory, choice.trials.get(option.text)
        return {
            "plan": option.text,
            "needs": option.needs,
            "memory": asdict(memory),
            "measured": None if trial is None else trial.memory,
            "left": None if trial is None else trial.left,
            "step_s": option.estimate.duration.total,
            "measured_s": None if trial is None else trial.step_s,
        }

    return [row(option) for option in options]


def _row(option: PlanOption, choice: PlanChoice, room: PlanRoom) -> tuple[str, ...]:
    memory, duration, trial = option.estimate.memory, option.estimate.duration, choice.trials.get(option.text)
    measured = "-" if trial is None else f"{gib(option.needs_with(trial.memory))} GiB"
    took = "-" if trial is None else _seconds(trial.step_s)
    estimated = f"{gib(option.needs_with(memory.step))} GiB"
    return option.text, estimated, measured, _seconds(duration.total), took, _verdict(option, choice, room)


def _verdict(option: PlanOption, choice: PlanChoice, room: PlanRoom) -> str:
    trial = choice.trials.get(option.text)
    if option.text == choice.option.text:
        return "chosen"
    if trial is None:
        return f"needs {gib(option.needs)} GiB of {gib(room.bytes)}"
    if not fits_as_measured(option, trial, room):
        return f"needs {gib(needs_as_measured(option, trial))} GiB of {gib(room.bytes)}, as measured"
    ratio = trial.step_s / choice.trials[choice.option.text].step_s
    return f"{ratio:.2f} times as long" if ratio > 1 else "as fast, and less plain"


def gib(size: int) -> str:
    """Bytes in GiB, with two decimals."""
    return f"{size / _GIB:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
