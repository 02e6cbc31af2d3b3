"""Tries plans in a few steps that train nothing, and measures what they take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elaunch.trainer import link
from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.model import GPT, VOCABULARY
from elaunch.trainer.parallel.build import Groups, Parallel, build
from elaunch.trainer.parallel.plan import Sizes
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.model_state import passes_to_final_sums
from elaunch.trainer.tuning.tune import finish_device, slowest_s

_MEASURED = 3
# After so many seconds a plan is measured no further.
_ENOUGH_S = 20.0
_NORM_MAX = 1.0


@dataclass(frozen=True)
class PlanTrial:
    """What a plan took in a few steps: a GPU's most bytes, and of the fastest step the slowest worker's seconds."""

    memory: int | None
    step_s: float


def try_plan(
    config: TrainConfig,
    sizes: Sizes,
    rank: int,
    device: torch.device,
    peers: Peers,
    *,
    new_gpt: Callable[[], GPT],
    groups: Groups,
) -> PlanTrial:
    """Build the plan of `config`, do a few steps on random text, and throw all of it away. Collective.

    The process groups of its axes stay: DTensor remembers meshes, and takes those of an equal mesh again.
    """
    link.phase("measuring")
    collect(device)
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    parallel = build(config, new_gpt(), sizes, rank, device, groups)
    # The whole network was there on each worker, and is gone.
    collect(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    order = Order(
        max(4096, config.global_batch),
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        even=config.plan.is_even,
    )
    # As the Keeper does it.
    for _ in range(passes_to_final_sums([parallel.model], peers.world_size)):
        parallel.warm_up(*_random(config, 1, device))
        parallel.optimizer.zero_grad(set_to_none=True)
    # The optimizer makes its moments, DDP its buckets, and the compiler does its work.
    _step(parallel, order, 1, config, device)
    finish_device(device)
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
    memory: int | None = None
    if device.type == "cuda":
        (memory,) = peers.largest([max(0, torch.cuda.max_memory_reserved(device) - before)])
    del parallel
    if config.compile:
        # What was compiled holds parameters.
        torch.compiler.reset()
    collect(device)
    return PlanTrial(memory, min(times_s))


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


def collect(device: torch.device) -> None:
    """Free what nothing refers to. The caching allocator of a GPU keeps it otherwise."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
