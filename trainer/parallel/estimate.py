"""The memory and the time of a step that a plan takes, before anything is built. Pure.

Memory is that of the worker that needs most. Its parts are those of docs/parallelism.md: parameters, gradients and
AdamW's two moments, what FSDP2 gathers, and the activations that the backward pass needs. At the end of a run each
worker collects the whole network's parameters, and then has no gradients and activations. All is float32, but for the
activations with bfloat16. Time is that of the computation, of the waits of a pipeline, of all that is exchanged, and of
the optimizer, one after the other: what overlaps in reality is an upper bound here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elaunch.trainer.parallel.checks import Shape, layers_of, microbatches, stages, windows_of_microbatch
from elaunch.trainer.parallel.plan import ParallelPlan, Sizes, parse

# Tensor parallel gathers, and sums and scatters, this often in a block: forward and backward, in each of its two pairs.
EXCHANGES_OF_BLOCK = 8
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
class WorkerSpeed:
    """A worker as it was measured: what its process takes without a model, its speed, and its link to the others.

    `sharded_s_per_byte` is what a byte takes that FSDP2 exchanges, with FSDP2's copies, and `exchange_s` what one of
    the exchanges of tensor parallel takes for a micro-batch, by the number of workers that share a matrix. `stage_s` is
    what a stage of a pipeline takes for a micro-batch besides its computation, and `stage_block_s` what each of its
    blocks adds to that. Where they are not measured, the link alone counts. `update_s_per_byte` is what the norm of the
    gradients and AdamW take for a byte of parameters.
    """

    base_bytes: int = 0
    flops_per_s: float = 1e10
    link_bytes_per_s: float = 1e9
    message_s: float = 1e-4
    sharded_s_per_byte: float = 0.0
    exchange_s: dict[str, float] = field(default_factory=dict)
    stage_s: float = 0.0
    stage_block_s: float = 0.0
    update_s_per_byte: float = 0.0

    def sending_s(self, sent: float, messages: int) -> float:
        """What so many bytes in so many messages take on the link."""
        return sent / self.link_bytes_per_s + messages * self.message_s


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

    base: int
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

    @property
    def total(self) -> int:
        """The peak of all that counts to the worker."""
        return self.base + self.copies + max(self.step, self.ending)


@dataclass(frozen=True)
class Duration:
    """Seconds of one step, by what they are for. `updating` is the norm of the gradients, and the optimizer."""

    computing: float
    waiting: float
    sending: float
    updating: float

    @property
    def total(self) -> float:
        return self.computing + self.waiting + self.sending + self.updating


@dataclass(frozen=True)
class Estimate:
    """What a plan takes."""

    memory: Memory
    duration: Duration


def estimate(
    plan: ParallelPlan,
    sizes: Sizes,
    shape: Shape,
    worker: WorkerSpeed,
    *,
    copies: KeptCopies = KeptCopies(),
    vocabulary: int = 256,
    bf16: bool = False,
) -> Estimate:
    """The estimate for a plan that fits `shape` (see `checks`). `bf16`: it computes in bfloat16."""
    memories = [
        _memory(rank, plan, sizes, shape, worker.base_bytes, copies, vocabulary, bf16=bf16) for rank in range(plan.pp)
    ]
    return Estimate(max(memories, key=lambda memory: memory.total), _duration(plan, sizes, shape, worker, vocabulary))


def parameters_of(rank: int, plan: ParallelPlan, shape: Shape, vocabulary: int) -> tuple[int, int]:
    """The parameters that a worker of the pipeline computes with: of one block, and of all that it has."""
    width, last = shape.width, stages(plan) - 1
    # Matrices and the biases of their outputs are divided. Norms, and the biases that are added to a sum, are not.
    block = (12 * width**2 + 7 * width) // plan.tp + 6 * width
    numbers = [rank + turn * plan.pp for turn in range(plan.stages_per_worker)]
    all_of_it = block * sum(len(layers_of(number, plan, shape.layers)) for number in numbers)
    if 0 in numbers:
        all_of_it += (vocabulary + shape.context) * width
    if last in numbers:
        all_of_it += 2 * width + (vocabulary * width if plan.pp > 1 else 0)
    return block, all_of_it


def turns_of_pipeline(pp: int, microbatches: int, stages_per_worker: int = 1) -> int:
    """The turns of a worker in a step. In each it takes a micro-batch through one of its stages, or waits as long."""
    return microbatches * stages_per_worker + pp - 1


def _memory(
    rank: int,
    plan: ParallelPlan,
    sizes: Sizes,
    shape: Shape,
    base: int,
    copies: KeptCopies,
    vocabulary: int,
    *,
    bf16: bool,
) -> Memory:
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
        base,
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
    has_scores = (rank + (plan.stages_per_worker - 1) * plan.pp) == stages(plan) - 1
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


def _blocks(rank: int, plan: ParallelPlan, shape: Shape) -> int:
    numbers = [rank + turn * plan.pp for turn in range(plan.stages_per_worker)]
    return sum(len(layers_of(number, plan, shape.layers)) for number in numbers)


def _duration(plan: ParallelPlan, sizes: Sizes, shape: Shape, worker: WorkerSpeed, vocabulary: int) -> Duration:
    passes = -(-shape.global_batch // shape.micro_batch // sizes.data)
    blocks = max(_blocks(rank, plan, shape) for rank in range(plan.pp))
    # A pipeline is as fast as its slowest worker: the last one has the most layers, and the scores.
    operations = operations_of_position(blocks, shape, vocabulary) / plan.tp
    computing = passes * shape.micro_batch * shape.context * operations / worker.flops_per_s
    many = microbatches(plan, sizes, shape) if plan.pp > 1 else 1
    turns, computed = turns_of_pipeline(plan.pp, many, plan.stages_per_worker), many * plan.stages_per_worker
    waiting = computing * (turns - computed) / computed
    own = max(parameters_of(rank, plan, shape, vocabulary)[1] for rank in range(plan.pp)) * _BYTES
    if plan.has_ddp:
        sending = _summing_s(plan, sizes, shape, worker, own)
    else:
        sending = _sharding_s(plan, sizes, worker, passes, own, blocks)
    activations = shape.micro_batch * shape.context * shape.width * _BYTES
    if plan.tp > 1:
        exchange_s = worker.sending_s((plan.tp - 1) / plan.tp * activations, 1)
        exchange_s = max(exchange_s, worker.exchange_s.get(str(plan.tp), 0.0))
        sending += passes * EXCHANGES_OF_BLOCK * blocks * exchange_s
    if plan.pp > 1:
        ways = 2 * plan.stages_per_worker
        link_s = worker.sending_s(ways * passes * activations / plan.tp, ways * many)
        besides_s = worker.stage_s + worker.stage_block_s * blocks / plan.stages_per_worker
        sending += max(link_s, turns * besides_s)
        # The byte embedding's gradient, which the first and the last worker sum.
        sending += worker.sending_s(vocabulary * shape.width * _BYTES, 1)
    updated = own / (sizes.dp if plan.kind == "zero1" else sizes.fsdp)
    # Without DDP the norm is a sum over all workers.
    norm_s = worker.message_s if sizes != Sizes() and not plan.has_ddp else 0.0
    return Duration(computing, waiting, sending, updated * worker.update_s_per_byte + norm_s)


def operations_of_position(blocks: int, shape: Shape, vocabulary: int) -> int:
    """Those of so many blocks and of the scores, forward and backward.

    Six for each weight that is multiplied, and attention's (Chowdhery et al., "PaLM", 2022, appendix B).
    """
    weights = 12 * shape.width**2 * blocks + vocabulary * shape.width
    return 6 * weights + 12 * blocks * shape.width * shape.context


def _summing_s(plan: ParallelPlan, sizes: Sizes, shape: Shape, worker: WorkerSpeed, own: int) -> float:
    """What DDP exchanges in a step, and ZeRO-1 beyond it. `own` are the bytes of the parameters."""
    data = sizes.data
    if data == 1:
        return 0.0
    is_zero1 = plan.kind == "zero1"
    sent = 2 * (data - 1) / data * own + ((data - 1) / data * own if is_zero1 else 0)
    return worker.sending_s(sent, 2 + (3 + 12 * shape.layers if is_zero1 else 0))


def _sharding_s(plan: ParallelPlan, sizes: Sizes, worker: WorkerSpeed, passes: int, own: int, blocks: int) -> float:
    """What FSDP2 exchanges in a step: gathered parameters, and gradients."""
    f, d = sizes.fsdp, sizes.dp
    gathers = 1 if plan.pp > 1 or plan.kind == "zero2" else 2 * passes
    sharded = (gathers + 1) * (f - 1) / f * own
    found = worker.sending_s(sharded, (gathers + 1) * (blocks + 1) if f > 1 else 0)
    summed = worker.sending_s(2 * (d - 1) / d * own / f, blocks + 1 if d > 1 else 0)
    return max(found, sharded * worker.sharded_s_per_byte) + summed
