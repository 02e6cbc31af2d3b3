"""The plans among which `--parallel auto` chooses. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elaunch.trainer.parallel.checks import Shape, require_fitting
from elaunch.trainer.parallel.plan import KINDS, SCHEDULES, ParallelPlan, PlanError, Sizes, fit, parse


@dataclass(frozen=True)
class Candidate:
    """A plan, and how many workers each axis gets."""

    plan: ParallelPlan
    sizes: Sizes

    @property
    def text(self) -> str:
        """What a user would type."""
        return self.plan.text


@dataclass(frozen=True)
class WorkerCount:
    """The workers of a job: how many there are, and how many of them each node has, if all have as many."""

    number: int
    of_node: int = 1


def candidates(workers: WorkerCount, shape: Shape, *, needs_ddp: bool = False) -> list[Candidate]:
    """All plans that fit the workers, the network and the batch. The plainest come first.

    `needs_ddp`: an option of DDP is given.
    """
    texts = [kind for kind in KINDS if kind != "hsdp"] if workers.number > 1 else ["ddp"]
    texts += [*_hybrid(workers), *_divided(workers)]
    found = []
    for text in texts:
        plan = parse(text)
        if not needs_ddp or plan.has_ddp:
            found += _fitting(plan, workers.number, shape)
    return found


def successors(kept: ParallelPlan, among: Sequence[Candidate], workers: WorkerCount, shape: Shape) -> list[Candidate]:
    """The candidates that can go on with the state of the plan `kept`. Raises PlanError if there is none.

    Only the numbers of the data axes and the order of the computation may differ.
    """
    found = [each for each in among if each.plan.form == kept.form]
    if found:
        return found
    sizes = fit(kept, workers.number, again=True)
    many = shape.global_batch // shape.micro_batch
    if many < sizes.data:
        raise PlanError(
            f"--parallel {kept.text}: a step has {many} micro-batches, too few for {sizes.data} replicas; "
            "use fewer workers or a smaller --micro-batch"
        )
    require_fitting(kept, sizes, shape)
    if kept.dp or kept.fsdp:
        # A new job takes typed numbers at their word.
        axes = str(sizes) if sizes != Sizes() else "fsdp2"
        kept = parse(f"{axes},schedule={kept.schedule}" if kept.pp > 1 else axes)
    return [Candidate(kept, sizes)]


def _hybrid(workers: WorkerCount) -> Iterator[str]:
    """HSDP with a set of shards on each node, or two sets on one node."""
    sets = workers.number // workers.of_node if workers.of_node < workers.number else 2
    if workers.number % sets == 0 and workers.number > sets > 1:
        yield f"dp={sets},fsdp={workers.number // sets}"


def _divided(workers: WorkerCount) -> Iterator[str]:
    """Plans with `tp` and `pp`. The workers that `tp` joins are on one node: they wait for each other in each block."""
    for tp, pp in itertools.product(_divisors(workers.of_node), _divisors(workers.number)):
        if tp * pp == 1 or workers.number % (tp * pp):
            continue
        data = workers.number // (tp * pp)
        axes = ",".join(f"{axis}={number}" for axis, number in (("tp", tp), ("pp", pp)) if number > 1)
        for first in ("dp", "fsdp") if data > 1 else ("",):
            divided = f"{first}={data},{axes}" if first else axes
            if pp == 1:
                yield divided
            else:
                yield from (f"{divided},schedule={schedule}" for schedule in reversed(SCHEDULES))


def _fitting(plan: ParallelPlan, workers: int, shape: Shape) -> list[Candidate]:
    try:
        sizes = fit(plan, workers)
        require_fitting(plan, sizes, shape)
    except PlanError:
        return []
    return [Candidate(plan, sizes)] if shape.global_batch // shape.micro_batch >= sizes.data else []


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
