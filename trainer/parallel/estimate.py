"""The plans among which `--parallel auto` chooses, and the memory that each takes, as formulas. Pure.

Plans are of the bundled network in float32 with AdamW. docs/parallelism.md has the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elaunch.trainer.parallel.checks import (
    Shape,
    layers_of,
    microbatches,
    require_fitting,
    stages,
    windows_of_microbatch,
)
from elaunch.trainer.parallel.plan import KINDS, SCHEDULES, ParallelPlan, PlanError, Sizes, fit, parse

_BYTES = 4
# The floats that a block keeps for its backward pass, for each position and unit of width. The input of both norms:
_KEPT_OF_NORMS = 2
# Queries, keys and values, attention's output (twice, since it is transposed) and the feed-forward layer's two fours:
_KEPT_DIVIDED = 13
# The inputs of the two matrices that are divided by their outputs: with tensor parallel each worker has all positions.
_KEPT_GATHERED = 2
# Scores, their logarithms and the gradient of these.
_KEPT_OF_SCORES = 3


@dataclass(frozen=True)
class Candidate:
    """A plan, and how many workers each axis gets."""

    plan: ParallelPlan
    sizes: Sizes


@dataclass(frozen=True)
class KeptCopies:
    """The copies of the state that the Keeper has in a node's memory, which is that of the `workers` of the node.

    `of_replicated` are copies of what all workers have alike, once per node; `of_parts` those of what a worker alone
    has.
    """

    workers: int = 1
    of_replicated: int = 0
    of_parts: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker, by what they are for. `activations` are of all micro-batches that are under way.

    `rebuilt` are DDP's second buckets, which are there with the first ones before the second forward pass. `collected`
    are the other workers' parameters at the end of the run. `copies` are the worker's share of the copies in memory.
    """

    parameters: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    rebuilt: int = 0
    collected: int = 0
    copies: int = 0

    @property
    def step(self) -> int:
        """What a step takes: at the end of a forward pass all of this is there, or before it the rebuilt buckets."""
        always = self.parameters + self.gradients + self.moments
        return always + max(self.gathered + self.activations, self.rebuilt)

    @property
    def ending(self) -> int:
        """What the end of the run takes, when the weights are collected."""
        return self.parameters + self.moments + self.collected


def candidates(workers: int, of_node: int, shape: Shape, *, needs_ddp: bool = False) -> list[Candidate]:
    """All plans that fit the workers, of which each node has `of_node`, the network and the batch. Plainest first.

    `needs_ddp`: an option of DDP is given.
    """
    texts = [kind for kind in KINDS if kind != "hsdp"] if workers > 1 else ["ddp"]
    texts += [*_hybrid(workers, of_node), *_divided(workers, of_node)]
    found = []
    for text in texts:
        plan = parse(text)
        if not needs_ddp or plan.has_ddp:
            found += _fitting(plan, workers, shape)
    return found


def successors(kept: ParallelPlan, among: Sequence[Candidate], workers: int, shape: Shape) -> list[Candidate]:
    """The candidates that can go on with the state of the plan `kept`. Raises PlanError if there is none.

    Only the numbers of the data axes and the order of the computation may differ.
    """
    found = [each for each in among if each.plan.form == kept.form]
    if found:
        return found
    sizes = fit(kept, workers, again=True)
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


def _hybrid(workers: int, of_node: int) -> Iterator[str]:
    """HSDP with a set of shards on each node, or two sets on one node."""
    sets = workers // of_node if of_node < workers else 2
    if workers % sets == 0 and workers > sets > 1:
        yield f"dp={sets},fsdp={workers // sets}"


def _divided(workers: int, of_node: int) -> Iterator[str]:
    """Plans with `tp` and `pp`: those that divide the model among few workers first.

    The workers that `tp` joins are on one node: they wait for each other in each block.
    """
    pairs = itertools.product(_divisors(of_node), _divisors(workers))
    for tp, pp in sorted(pairs, key=lambda pair: pair[0] * pair[1]):
        if tp * pp == 1 or workers % (tp * pp):
            continue
        data = workers // (tp * pp)
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


def memory(
    candidate: Candidate,
    shape: Shape,
    *,
    copies: KeptCopies = KeptCopies(),
    vocabulary: int = 256,
    bf16: bool = False,
) -> Memory:
    """The memory of the worker that needs most. `bf16`: it computes in bfloat16."""
    of_all = [_memory(rank, candidate, shape, copies, vocabulary, bf16=bf16) for rank in range(candidate.plan.pp)]
    return max(of_all, key=lambda each: each.copies + max(each.step, each.ending))


def parameters_of(rank: int, plan: ParallelPlan, shape: Shape, vocabulary: int) -> tuple[int, int]:
    """The parameters that a worker of the pipeline computes with: of one block, and of all that it has."""
    width, last = shape.width, stages(plan) - 1
    # Matrices and the biases of their outputs are divided. Norms, and the biases that are added to a sum, are not.
    block = (12 * width**2 + 7 * width) // plan.tp + 6 * width
    numbers = _stages_of(rank, plan)
    all_of_it = block * _blocks(rank, plan, shape)
    if 0 in numbers:
        all_of_it += (vocabulary + shape.context) * width
    if last in numbers:
        all_of_it += 2 * width + (vocabulary * width if plan.pp > 1 else 0)
    return block, all_of_it


def _memory(
    rank: int, candidate: Candidate, shape: Shape, copies: KeptCopies, vocabulary: int, *, bf16: bool
) -> Memory:
    plan, sizes = candidate.plan, candidate.sizes
    block, own = parameters_of(rank, plan, shape, vocabulary)
    ends = own - block * _blocks(rank, plan, shape)
    passes = -(-shape.global_batch // shape.micro_batch // sizes.data)
    held, gathered, gradients, moments = own, 0, own, 2 * own
    if plan.has_ddp and plan.kind == "zero1":
        # Whole parameters are dealt out: one worker has at least the largest.
        moments = 2 * max(-(-own // sizes.dp), vocabulary * shape.width)
    elif not plan.has_ddp:
        held, moments = -(-own // sizes.fsdp), 2 * -(-own // sizes.fsdp)
        keeps = plan.pp > 1 or (plan.kind == "zero2" and not plan.divides_model)
        gathered = own if keeps else min(own, 2 * block + ends)
        # Gradients stay whole until the last micro-batch. Of one alone they are reduced block by block.
        gradients = held + (own if passes > 1 or plan.pp > 1 else min(own, 2 * block + ends))
    whole = parameters_of(0, parse("ddp"), shape, vocabulary)[1]
    replicated, part = (0, held + moments) if not plan.has_ddp else (held + moments, 0)
    if plan.kind == "zero1" and plan.has_ddp:
        replicated, part = held, moments
    return Memory(
        _BYTES * held,
        _BYTES * gradients,
        _BYTES * moments,
        _BYTES * gathered,
        _BYTES * _activations(rank, plan, sizes, shape, vocabulary, bf16=bf16),
        # With more workers this happens before the first step, when there are no moments (the Keeper's warm-up).
        rebuilt=_BYTES * own if plan.has_ddp and sizes.data == 2 else 0,
        collected=0 if plan.has_ddp else _BYTES * whole,
        copies=_BYTES * (copies.of_parts * part + -(-copies.of_replicated * replicated // copies.workers)),
    )


def _activations(rank: int, plan: ParallelPlan, sizes: Sizes, shape: Shape, vocabulary: int, *, bf16: bool) -> int:
    """Floats that the backward passes of all micro-batches under way need."""
    has_scores = stages(plan) - 1 in _stages_of(rank, plan)
    if plan.pp == 1:
        windows, under_way = shape.micro_batch, 1
    else:
        windows, many = windows_of_microbatch(plan, sizes, shape), microbatches(plan, sizes, shape)
        # Interleaved computes so many stages ahead, of which a worker has two (Narayanan et al., 2021, section 2.2).
        stages_ahead = plan.pp + 2 * (plan.pp - rank - 1) + 1
        ahead = {"gpipe": many, "1f1b": plan.pp - rank, "interleaved": -(-stages_ahead // 2)}[plan.schedule]
        under_way = min(many, ahead)
    positions = windows * shape.context
    # Autocast keeps the residual in float32, so the inputs of the norms too.
    size = 0.5 if bf16 else 1.0
    kept = (_KEPT_OF_NORMS + size * _KEPT_DIVIDED) / plan.tp + size * _KEPT_GATHERED
    block = int(positions * shape.width * kept)
    scores = positions // plan.tp * vocabulary * _KEPT_OF_SCORES if has_scores else 0
    # One block more for the gradients of its activations. Of scores only the logarithms stay until the backward pass.
    several = (scores // _KEPT_OF_SCORES) * (under_way - 1)
    # Each micro-batch has its own copy of the matrices in bfloat16 until its backward pass.
    casts = int(size * parameters_of(rank, plan, shape, vocabulary)[1]) * under_way if bf16 else 0
    return block * (_blocks(rank, plan, shape) * under_way + 1) + scores + several + casts


def _stages_of(rank: int, plan: ParallelPlan) -> list[int]:
    return [rank + turn * plan.pp for turn in range(plan.stages_per_worker)]


def _blocks(rank: int, plan: ParallelPlan, shape: Shape) -> int:
    return sum(len(layers_of(number, plan, shape.layers)) for number in _stages_of(rank, plan))
