"""Tries plans in a few steps that train nothing, and measures what they take."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from elaunch.trainer import link
from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.model import GPT, VOCABULARY
from elaunch.trainer.parallel.build import Groups, Parallel, build
from elaunch.trainer.parallel.choice import PlanTrial
from elaunch.trainer.parallel.plan import Sizes
from elaunch.trainer.parallel.speed import clear
from elaunch.trainer.parallel.worker_memory import PeakMeter
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.model_state import passes_to_final_sums
from elaunch.trainer.tuning.passes import finish_device, slowest_s

_MEASURED = 3
# After so many seconds a plan is measured no further.
_ENOUGH_S = 20.0
_NORM_MAX = 1.0


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
    clear(compiled=config.compile)
    step_s = min(times_s)
    return PlanTrial(peak, step_s, left, max(0.0, settling_s - step_s) if config.compile else 0.0)


def _step(parallel: Parallel, order: Order, step: int, config: TrainConfig, device: torch.device) -> None:
    for micros in parallel.micro_batches(order, step):
        parallel.backward(*_random(config, len(micros), device), micros)
    parallel.clip(_NORM_MAX)
    parallel.optimizer.step()
    parallel.optimizer.zero_grad(set_to_none=True)


def _random(config: TrainConfig, many: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of so many micro-batches."""
    rows = torch.randint(VOCABULARY, (many * config.micro_batch, config.context + 1), device=device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
