"""What a plan of the bundled trainer takes, as measured: `plan_cost.py PLAN SHAPE STEPS`, SHAPE as JSON.

Each rank trains on random bytes. Rank 0 prints one JSON line: of the worst rank the peak of its memory above what the
process had before the network was made, the median of the steps' seconds, and the speed of a worker and of its link as
they are without a plan.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.parallel.build import build
from elaunch.trainer.ranks import process_group
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.train import decay_groups, new_gpt

CPU = torch.device("cpu")
_LINK_BYTES = 8 << 20


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, or VmHWM, which is the most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def flops_per_s(config: TrainConfig) -> float:
    """The speed of a product of the size that the network has, alone on this worker's core."""
    positions = config.micro_batch * config.context
    inputs, weights = torch.randn(positions, config.width), torch.randn(config.width, 4 * config.width)
    times_s = []
    for _ in range(12):
        begun_s = time.perf_counter()
        inputs @ weights
        times_s.append(time.perf_counter() - begun_s)
    return 8 * positions * config.width**2 / statistics.median(times_s)


def link() -> tuple[float, float]:
    """Bytes per second that a worker sends in an all-reduce, and seconds of one of a single number."""

    def took_s(tensor: torch.Tensor) -> float:
        times_s = []
        for _ in range(6):
            begun_s = time.perf_counter()
            dist.all_reduce(tensor)
            times_s.append(time.perf_counter() - begun_s)
        return statistics.median(times_s)

    size = dist.get_world_size()
    short_s, long_s = took_s(torch.zeros(1)), took_s(torch.zeros(_LINK_BYTES // 4))
    return 2 * (size - 1) / size * _LINK_BYTES / max(long_s - short_s, 1e-9) if size > 1 else 1e12, short_s


def main() -> None:
    plan, shape, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    place = RankInfo.from_environ(os.environ)
    process_group.join(place)
    config = TrainConfig(parallel=plan, **shape)
    config.check(place)
    speed, (link_bytes_per_s, message_s) = flops_per_s(config), link()
    sizes = config.sizes(place)
    share = sizes.share(place.rank)
    order = Order(4096, global_batch=config.global_batch, micro_batch=config.micro_batch, even=config.plan.is_even)
    if config.plan.divides_model:
        # These are no part of a plan's memory either.
        from elaunch.trainer.parallel import divided, tensor  # noqa: F401
    elif config.plan.is_even:
        from torch.distributed import fsdp  # noqa: F401
    dist.barrier()
    before = memory("VmRSS")
    parallel = build(config, new_gpt(config, CPU), sizes, place.rank, CPU, decay_groups)
    # The whole network was there, and goes: it is no part of a plan's peak.
    gc.collect()
    forget_peak()
    times_s = []
    for step in range(1, steps + 1):
        dist.barrier()
        begun_s = time.perf_counter()
        for micros in parallel.micro_batches(order, step):
            rows = torch.randint(0, 256, (len(micros) * config.micro_batch, config.context + 1))
            parallel.backward(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), micros)
        parallel.clip(1.0)
        parallel.optimizer.step()
        parallel.optimizer.zero_grad(set_to_none=True)
        times_s.append(time.perf_counter() - begun_s)
    peak = torch.tensor([float(memory("VmHWM") - before)])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if place.leads:
        found = {"peak": peak.item(), "step_s": statistics.median(times_s[1:]), "flops_per_s": speed}
        print(json.dumps({**found, "link_bytes_per_s": link_bytes_per_s, "message_s": message_s}), flush=True)
    assert share.world_size == sizes.data
    dist.barrier()
    os._exit(0)


main()
