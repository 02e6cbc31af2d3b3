"""The plan of `--parallel`, the size of each axis, and whether they fit the network and the batch. Pure.

A plan divides the workers along four axes. `dp` and `fsdp` divide the data: their workers compute different windows.
With `dp` a worker has a copy of the parameters, with `fsdp` a shard of them. `tp` and `pp` divide the model: `tp` each
matrix, `pp` the layers. The workers that `tp` and `pp` join are one *replica*, and read the same windows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from elaunch.trainer.data.order import Order

# The data axes of each kind of plan.
KINDS = {"ddp": ("dp",), "zero1": ("dp",), "zero2": ("fsdp",), "fsdp2": ("fsdp",), "hsdp": ("dp", "fsdp")}
# The name in place of a plan: the trainer chooses one.
AUTO = "auto"
AXES = ("dp", "fsdp", "tp", "pp")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
_AXIS = re.compile(rf"({'|'.join(AXES)})=0*([1-9][0-9]{{0,8}})")
_SCHEDULE = re.compile(rf"(schedule)=({'|'.join(SCHEDULES)})")
# How many stages of an interleaved pipeline each worker has.
_INTERLEAVED_STAGES = 2


class ConfigError(ValueError):
    """The user's request is invalid: one sentence with the values and the way out, exit code 2."""


class PlanError(ConfigError):
    """The plan cannot be carried out."""


@dataclass(frozen=True)
class ParallelPlan:
    """A parsed plan; `text` is what the user typed.

    `dp` and `fsdp` are None where the user left their number open: they get the workers that `tp` and `pp` leave.
    """

    text: str
    kind: str
    dp: int | None = None
    fsdp: int | None = None
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"

    @property
    def is_auto(self) -> bool:
        """Whether the plan is not chosen yet: no other field counts then."""
        return self.kind == AUTO

    @property
    def divides_model(self) -> bool:
        """Whether several workers share one model: tensor parallel, or a pipeline."""
        return self.tp * self.pp > 1

    @property
    def has_ddp(self) -> bool:
        """Whether each worker has all parameters, in DistributedDataParallel."""
        return not self.divides_model and self.kind in ("ddp", "zero1")

    @property
    def is_even(self) -> bool:
        """Whether all workers must compute the same number of micro-batches, each of which has collectives."""
        return not self.has_ddp

    @property
    def stages_per_worker(self) -> int:
        """The number of pipeline stages per worker."""
        return _INTERLEAVED_STAGES if self.pp > 1 and self.schedule == "interleaved" else 1

    @property
    def identity(self) -> str:
        """How the state is partitioned, which cannot change within a run. The sizes of the axes may change."""
        if self.is_auto:
            return self.kind
        divided = [axis for axis, number in (("tp", self.tp), ("pp", self.pp)) if number > 1]
        # A divided model uses FSDP2 for its data axes, whichever was given.
        return ",".join(divided) or ("fsdp2" if KINDS[self.kind] != ("dp",) else self.kind)

    @property
    def form(self) -> tuple[str, int, int]:
        """The plan without the sizes of the data axes and the schedule."""
        return self.kind, self.tp, self.pp


@dataclass(frozen=True)
class Shape:
    """The sizes of the network and the batch that a plan divides."""

    layers: int
    heads: int
    width: int
    context: int
    global_batch: int
    micro_batch: int


@dataclass(frozen=True)
class DataShare:
    """A worker's share of the data: that of replica `rank` of `world_size`. One worker of each replica `leads`."""

    rank: int
    world_size: int
    leads: bool


@dataclass(frozen=True)
class Sizes:
    """The number of workers along each axis. Over the ranks `tp` varies fastest, then `fsdp`, `dp`, `pp`."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def data(self) -> int:
        """The number of replicas of the model, whole or in shards."""
        return self.dp * self.fsdp

    def share(self, rank: int) -> DataShare:
        """The share of that rank."""
        return DataShare(rank // self.tp % self.data, self.data, rank % self.tp == 0 and rank < self.data * self.tp)

    def __str__(self) -> str:
        numbers = {"dp": self.dp, "fsdp": self.fsdp, "tp": self.tp, "pp": self.pp}
        return ",".join(f"{axis}={number}" for axis, number in numbers.items() if number > 1) or "dp=1"


def parse(text: str) -> ParallelPlan:
    """The plan that `text` names. Raises PlanError."""
    if text in (*KINDS, AUTO):
        return ParallelPlan(text, text)
    given: dict[str, str] = {}
    for term in text.split(","):
        match = _AXIS.fullmatch(term) or _SCHEDULE.fullmatch(term)
        if match is None:
            raise PlanError(
                f"--parallel {text}: there is no plan {term!r}; use one of {', '.join((*KINDS, AUTO))}, or the number "
                f"of workers along each axis, as dp=2,tp=2, of {', '.join(AXES)}, and with pp a "
                f"schedule={'|'.join(SCHEDULES)}"
            )
        if match[1] in given:
            raise PlanError(f"--parallel {text}: {match[1]} is given twice; leave one out")
        given[match[1]] = match[2]
    schedule = given.pop("schedule", "")
    numbers = {axis: int(number) for axis, number in given.items()}
    if schedule and numbers.get("pp", 1) == 1:
        raise PlanError(f"--parallel {text}: schedule belongs to a pipeline; add pp=2 or more, or leave schedule out")
    kind = "ddp" if "fsdp" not in numbers else "hsdp" if "dp" in numbers else "fsdp2"
    return ParallelPlan(text, kind, **numbers, schedule=schedule or "1f1b")


def fit(plan: ParallelPlan, workers: int, *, again: bool = False) -> Sizes:
    """The size of each axis. Raises PlanError if the plan does not fit the number of workers.

    `again` is for a restart, where `dp` and `fsdp` follow the number of workers, whatever the user gave. `tp` and `pp`
    stay: they decide how large a part of the model a worker holds.
    """
    one = plan.tp * plan.pp
    if workers % one:
        fewer, more = workers // one * one, (workers // one + 1) * one
        ways = f"start {more}" if not fewer else f"start {fewer} or {more}"
        stays = "; a run that continues keeps its tp and pp here" if again else ""
        raise PlanError(
            f"--parallel {plan.text} divides one model among {one} workers, and {_workers(workers)} cannot be divided "
            f"so{stays}; {ways} workers, or give another plan"
        )
    dp, fsdp = _data_axes(plan, workers // one, workers, again)
    return Sizes(dp, fsdp, plan.tp, plan.pp)


def _data_axes(plan: ParallelPlan, data: int, workers: int, again: bool) -> tuple[int, int]:
    """`dp` and `fsdp` for `data` replicas. At a restart `fsdp` stays if it can."""
    match KINDS[plan.kind]:
        case ("dp",):
            wanted, follows = (plan.dp or data, 1), (data, 1)
        case ("fsdp",):
            wanted, follows = (1, plan.fsdp or data), (1, data)
        case _:
            # Without numbers there are two sets of shards.
            fsdp = plan.fsdp or (data if data % 2 else data // 2)
            wanted = (plan.dp or 2, fsdp)
            follows = (1, data) if data % fsdp else (data // fsdp, fsdp)
    if again or math.prod(wanted) == data:
        return follows
    needed = math.prod(wanted) * plan.tp * plan.pp
    raise PlanError(
        f"--parallel {plan.text} is for {_workers(needed)}, and there are {workers}; use numbers for dp and fsdp whose "
        f"product is {data}, or leave them out where another axis is given"
    )


def require_fitting(plan: ParallelPlan, sizes: Sizes, shape: Shape) -> None:
    """Raise PlanError with the values and the way out if an axis does not divide what it must."""
    try:
        # Each replica needs a micro-batch.
        Order(1, global_batch=shape.global_batch, micro_batch=shape.micro_batch).share(0, sizes.data)
    except ValueError as error:
        raise PlanError(f"--parallel {plan.text}: {error}") from error
    where = f"--parallel {plan.text}:"
    if sizes.tp > 1:
        divided = (("--heads", shape.heads, 1), ("--context", shape.context, 1), ("--width", shape.width, sizes.fsdp))
        for option, number, shards in divided:
            by, axes = sizes.tp * shards, "tp" if shards == 1 else "tp × fsdp"
            if number % by:
                raise PlanError(
                    f"{where} {option} ({number}) is not divisible by {axes} ({by}); use {option} "
                    f"{-(-number // by) * by}, or another plan"
                )
    many = microbatches(sizes.data, shape)
    if stages(plan) > shape.layers:
        raise PlanError(
            f"{where} the pipeline has {stages(plan)} stages ({plan.stages_per_worker} on each worker), and the "
            f"network --layers {shape.layers}; use --layers {stages(plan)}, or a smaller pp"
        )
    if plan.schedule != "gpipe" and many < plan.pp:
        raise PlanError(
            f"{where} {plan.schedule} needs at least as many micro-batches per replica and step as pp ({plan.pp}), and "
            f"has {many}; use a smaller --micro-batch, a larger --global-batch, or schedule=gpipe"
        )
    # torch divides the micro-batches into `many // pp` rounds, which must be of equal length.
    if plan.schedule == "interleaved" and many % (many // plan.pp):
        raise PlanError(
            f"{where} interleaved cannot divide {many} micro-batches into {many // plan.pp} rounds of equal length; "
            f"use a number of micro-batches that pp ({plan.pp}) divides, or schedule=1f1b"
        )


def stages(plan: ParallelPlan) -> int:
    """The number of pipeline stages."""
    return plan.pp * plan.stages_per_worker


def layers_of(stage: int, plan: ParallelPlan, layers: int) -> range:
    """The contiguous layers of that stage; the counts of two stages differ by at most one."""
    many = stages(plan)
    return range(layers * stage // many, layers * (stage + 1) // many)


def microbatches(replicas: int, shape: Shape) -> int:
    """How many micro-batches each replica computes in a step; one of them may be a filler."""
    return -(-shape.global_batch // shape.micro_batch // replicas)


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"
