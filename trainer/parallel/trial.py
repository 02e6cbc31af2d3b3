"""Measures a worker, and plans in a few steps that train nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer import link
from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.model import GPT, VOCABULARY, Block
from elaunch.trainer.parallel.build import Groups, Parallel, build
from elaunch.trainer.parallel.checks import Shape
from elaunch.trainer.parallel.choice import PlanTrial
from elaunch.trainer.parallel.estimate import WorkerSpeed
from elaunch.trainer.parallel.plan import Sizes
from elaunch.trainer.parallel.worker_memory import PeakMeter, give_back_freed
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.model_state import passes_to_final_sums
from elaunch.trainer.tuning.passes import finish_device, slowest_s

_MEASURED = 3
# After so many seconds a plan is measured no further.
_ENOUGH_S = 20.0
_REPEATS = 3
_MESSAGE_BYTES = 8 << 20
_NORM_MAX = 1.0


def worker_speed(shape: Shape, device: torch.device, peers: Peers, *, compiled: bool = False) -> WorkerSpeed:
    """The speed of the slowest worker, and of the link. Collective.

    All workers compute and send at the same time, as they do in training. With `compiled` this loads the compiler: it
    is part of the process without a model then.
    """
    link.phase("measuring")
    width, positions = shape.width, shape.micro_batch * shape.context
    block_s = _block_s(shape, device, peers, compiled=compiled)
    _clear(compiled=compiled)
    # The operations that the estimate counts for a block.
    operations = positions * (6 * 12 * width**2 + 12 * shape.context * width)
    if peers.world_size == 1:
        return WorkerSpeed(flops_per_s=operations / block_s)
    short, long = (torch.zeros(size // 4, device=device) for size in (4, _MESSAGE_BYTES))
    short_s, long_s = (_repeated(lambda sent=sent: dist.all_reduce(sent), device, peers) for sent in (short, long))  # type: ignore[misc]
    sent = 2 * (peers.world_size - 1) / peers.world_size * _MESSAGE_BYTES
    return WorkerSpeed(0, operations / block_s, sent / max(long_s - short_s, 1e-6), short_s)


def try_plan(
    config: TrainConfig,
    sizes: Sizes,
    rank: int,
    device: torch.device,
    peers: Peers,
    *,
    meter: PeakMeter,
    new_gpt: Callable[[], GPT],
    groups: Groups,
) -> PlanTrial:
    """Build the plan of `config`, do a few steps on random text, and throw all of it away. Collective.

    The process groups of its axes stay: DTensor remembers meshes, and takes those of an equal mesh again.
    """
    link.phase("measuring")
    meter.start()
    parallel = build(config, new_gpt(), sizes, rank, device, groups)
    # The whole network was there on each worker, and is gone.
    meter.begin()
    order = Order(
        max(4096, config.global_batch),
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        even=config.plan.is_even,
    )
    begun_s = time.perf_counter()
    # As the Keeper does it.
    for _ in range(passes_to_final_sums([parallel.model], peers.world_size)):
        parallel.warm_up(*_random(config, 1, device))
        parallel.optimizer.zero_grad(set_to_none=True)
    # The optimizer makes its moments, DDP its buckets, and the compiler does its work.
    _step(parallel, order, 1, config, device)
    finish_device(device)
    settling_s = slowest_s(time.perf_counter() - begun_s, peers)
    link.phase("measuring")
    times_s: list[float] = []
    while len(times_s) < _MEASURED and sum(times_s) < _ENOUGH_S:
        # All begin together, or a rank's time would have another rank's lateness in it.
        peers.largest([0])
        begun_s = time.perf_counter()
        _step(parallel, order, len(times_s) + 2, config, device)
        finish_device(device)
        times_s.append(slowest_s(time.perf_counter() - begun_s, peers))
        link.phase("measuring")
    peak, left = peers.largest([meter.peak(), meter.left])
    del parallel
    _clear(compiled=config.compile)
    step_s = min(times_s)
    return PlanTrial(peak, step_s, left, max(0.0, settling_s - step_s) if config.compile else 0.0)


def _block_s(shape: Shape, device: torch.device, peers: Peers, *, compiled: bool) -> float:
    """How long one block of the network takes forward and backward."""
    block = Block(shape.width, shape.heads, dropout=0.0).to(device)
    if compiled:
        block.compile()
    inputs = torch.randn(shape.micro_batch, shape.context, shape.width, device=device)
    return _repeated(lambda: block(inputs).sum().backward(), device, peers)


def _step(parallel: Parallel, order: Order, step: int, config: TrainConfig, device: torch.device) -> None:
    for micros in parallel.micro_batches(order, step):
        parallel.backward(*_random(config, len(micros), device), micros)
    parallel.clip(_NORM_MAX)
    parallel.optimizer.step()
    parallel.optimizer.zero_grad(set_to_none=True)


def _clear(*, compiled: bool) -> None:
    """Give back what was freed, and drop what was compiled, which holds parameters."""
    if compiled:
        torch.compiler.reset()
    give_back_freed()


def _random(config: TrainConfig, many: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of so many micro-batches."""
    rows = torch.randint(VOCABULARY, (many * config.micro_batch, config.context + 1), device=device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _repeated(do: Callable[[], object], device: torch.device, peers: Peers) -> float:
    """The slowest worker's seconds of the fastest turn: other programs only make one slower."""
    times_s = []
    for _ in range(_REPEATS + 1):
        peers.largest([0])
        begun_s = time.perf_counter()
        do()
        finish_device(device)
        times_s.append(slowest_s(time.perf_counter() - begun_s, peers))
    return min(times_s[1:])
