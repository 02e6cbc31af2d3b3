"""The candidate plans of `--parallel auto`, and formulas for the memory of each. Pure.

The formulas (docs/parallelism.md) are for the bundled network in float32 with AdamW.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from elaunch.trainer.parallel.plan import (
    KINDS,
    SCHEDULES,
    ParallelPlan,
    PlanError,
    Shape,
    Sizes,
    fit,
    microbatches,
    parse,
    require_fitting,
    stages,
)

_BYTES = 4
_VOCABULARY = 256
# Floats saved for a block's backward pass, per position and unit of width. The inputs of both norms:
_KEPT_OF_NORMS = 2
# Queries, keys, values, attention's output (twice: transposed), and the 4-wide hidden layer before and after GELU:
_KEPT_DIVIDED = 13
# The inputs of the two column-parallel matrices: with tensor parallelism each worker has all positions.
_KEPT_GATHERED = 2
# Logits, their log-softmax, and its gradient.
_KEPT_OF_LOGITS = 3


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker by purpose; `activations` are those of all micro-batches in flight."""

    parameters: int
    gradients: int
    moments: int
    gathered: int
    activations: int

    @property
    def step(self) -> int:
        """A step's peak: all of this is allocated at the end of a forward pass."""
        return self.parameters + self.gradients + self.moments + self.gathered + self.activations


@dataclass(frozen=True)
class Candidate:
    """A plan, the size of each axis, and a worker's estimated memory."""

    plan: ParallelPlan
    sizes: Sizes
    memory: Memory


def candidates(
    workers: int,
    of_node: int,
    shape: Shape,
    *,
    needs_ddp: bool = False,
    bf16: bool = False,
) -> list[Candidate]:
    """All plans that fit the workers (`of_node` per node), the network and the batch. Simplest first.

    `needs_ddp`: an option of DDP is given. `bf16` is as for `memory`.
    """
    texts = [kind for kind in KINDS if kind != "hsdp"] if workers > 1 else ["ddp"]
    texts += [*_hybrid(workers, of_node), *_divided(workers, of_node)]
    found = []
    for plan in map(parse, texts):
        if (plan.has_ddp or not needs_ddp) and _fits(plan, workers, shape):
            sizes = fit(plan, workers)
            found.append(Candidate(plan, sizes, memory(plan, sizes, shape, bf16=bf16)))
    return found


def resumed(kept: ParallelPlan, workers: int, shape: Shape) -> ParallelPlan:
    """The plan that resumes the state of the plan `kept`. Raises PlanError if there is none.

    Only the sizes of the data axes and the schedule may differ.
    """
    sizes = fit(kept, workers, again=True)
    axes = kept.text.partition(",schedule=")[0]
    if kept.dp or kept.fsdp:
        # In a new job the given numbers are binding.
        axes = str(sizes) if sizes != Sizes() else "fsdp2"
    if kept.pp == 1:
        able = [parse(axes)]
    else:
        able = [parse(f"{axes},schedule={schedule}") for schedule in (kept.schedule, *reversed(SCHEDULES))]
    found = next((plan for plan in able if _fits(plan, workers, shape)), None)
    if found is None:
        require_fitting(kept, sizes, shape)
    return found or kept


def _hybrid(workers: int, of_node: int) -> Iterator[str]:
    """HSDP with a set of shards on each node, or two sets on one node."""
    sets = workers // of_node if of_node < workers else 2
    if workers % sets == 0 and workers > sets > 1:
        yield f"dp={sets},fsdp={workers // sets}"


def _divided(workers: int, of_node: int) -> Iterator[str]:
    """Plans with `tp` and `pp`, fewest workers per model first.

    A `tp` group is within one node, since it communicates in each block.
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


def _fits(plan: ParallelPlan, workers: int, shape: Shape) -> bool:
    try:
        require_fitting(plan, fit(plan, workers), shape)
    except PlanError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def memory(plan: ParallelPlan, sizes: Sizes, shape: Shape, *, bf16: bool = False) -> Memory:
    """The memory of a worker with the most blocks, and both ends of the network. `bf16`: it computes in bfloat16."""
    block, blocks, own = parameters_of(plan, shape)
    ends = own - block * blocks
    held, moments, gradients, gathered = own, 2 * own, own, 0
    if not plan.has_ddp:
        held = -(-own // sizes.fsdp)
        moments = 2 * held
        # A pipeline keeps gathered parameters, as ZeRO-2 does. Gradients are unsharded until the last micro-batch.
        keeps = plan.pp > 1 or (plan.kind == "zero2" and not plan.divides_model)
        gathered = own if keeps else min(own, 2 * block + ends)
        gradients = held + own
    elif plan.kind == "zero1":
        # Whole parameters are assigned: one worker has at least the largest.
        moments = 2 * max(-(-own // sizes.dp), _VOCABULARY * shape.width)
    return Memory(
        _BYTES * held,
        _BYTES * gradients,
        _BYTES * moments,
        _BYTES * gathered,
        _BYTES * _activations(plan, sizes, shape, bf16=bf16),
    )


def parameters_of(plan: ParallelPlan, shape: Shape) -> tuple[int, int, int]:
    """A worker's parameters per block, its blocks, and its parameters in all."""
    width = shape.width
    # Matrices and column-parallel biases are divided. Norms, and the biases of row-parallel matrices, are not.
    block = (12 * width**2 + 7 * width) // plan.tp + 6 * width
    blocks = plan.stages_per_worker * -(-shape.layers // stages(plan))
    return block, blocks, block * blocks + (_VOCABULARY + shape.context + 2) * width


def _activations(plan: ParallelPlan, sizes: Sizes, shape: Shape, *, bf16: bool) -> int:
    """Floats saved for the backward passes of all micro-batches in flight."""
    _, blocks, own = parameters_of(plan, shape)
    many = microbatches(sizes.data, shape) if plan.pp > 1 else 1
    # Interleaved has 3 pp - 1 half-sized stages in flight (Narayanan et al., 2021, section 2.2).
    ahead = {"gpipe": many, "1f1b": plan.pp, "interleaved": -(-(3 * plan.pp - 1) // 2)}[plan.schedule]
    under_way = min(many, ahead)
    positions = shape.micro_batch * shape.context
    # Autocast keeps the residual, and so the norms' inputs, in float32.
    size = 0.5 if bf16 else 1.0
    kept = (_KEPT_OF_NORMS + size * _KEPT_DIVIDED) / plan.tp + size * _KEPT_GATHERED
    logits = positions // plan.tp * _VOCABULARY
    # Until its backward pass each micro-batch has its own copy of the matrices in bfloat16, and its log-softmax.
    casts = int(size * own) if bf16 else 0
    # One more block, for the gradients of its activations.
    of_blocks = int(positions * shape.width * kept) * (blocks * under_way + 1)
    return of_blocks + logits * (_KEPT_OF_LOGITS - 1) + under_way * (logits + casts)
