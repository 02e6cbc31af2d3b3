"""What a plan of the bundled trainer takes, as measured: `plan_cost.py PLAN SHAPE STEPS`, SHAPE as JSON.

Each rank trains on random bytes. Rank 0 prints one JSON line. It has, of the worst rank, the memory above what the
process had before the network was made: its peak, and what is held when gradients are summed and activations are gone.
It has the median of the steps' seconds, the number of the network's parameters, and a worker as auto measures it.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.parallel.build import build
from elaunch.trainer.parallel.speed import worker_speed
from elaunch.trainer.parallel.worker_memory import give_back_freed
from elaunch.trainer.ranks import process_group
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.train import decay_groups, new_gpt

CPU = torch.device("cpu")


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, or VmHWM, which is the most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    plan, shape, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    place = RankInfo.from_environ(os.environ)
    process_group.join(place)
    config = TrainConfig(parallel=plan, **shape)
    config.check(place)
    if config.plan.divides_model:
        # These are no part of a plan's memory.
        from elaunch.trainer.parallel import divided, tensor  # noqa: F401
    elif config.plan.is_even:
        from torch.distributed import fsdp  # noqa: F401
    peers = Peers()
    speed = worker_speed(config, CPU, peers, [config.plan], free=sys.maxsize)
    sizes = config.sizes(place)
    share = sizes.share(place.rank)
    order = Order(4096, global_batch=config.global_batch, micro_batch=config.micro_batch, even=config.plan.is_even)
    dist.barrier()
    before = memory("VmRSS")
    gpt = new_gpt(config, CPU)
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    parallel = build(config, gpt, sizes, place.rank, CPU, decay_groups)
    # The whole network was there, and goes: it is no part of a plan's peak.
    del gpt
    gc.collect()
    forget_peak()
    times_s, held = [], 0
    for step in range(1, steps + 1):
        dist.barrier()
        begun_s = time.perf_counter()
        for micros in parallel.micro_batches(order, step):
            rows = torch.randint(0, 256, (len(micros) * config.micro_batch, config.context + 1))
            parallel.backward(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), micros)
        parallel.clip(1.0)
        if step == steps:
            give_back_freed()
            held = memory("VmRSS") - before
        parallel.optimizer.step()
        parallel.optimizer.zero_grad(set_to_none=True)
        times_s.append(time.perf_counter() - begun_s)
    peak, held = peers.largest([memory("VmHWM") - before, held])
    if place.leads:
        found = {"peak": peak, "held": held, "parameters": parameters, "step_s": statistics.median(times_s[1:])}
        print(json.dumps({**found, "worker": asdict(speed)}), flush=True)
    assert share.world_size == sizes.data
    dist.barrier()
    os._exit(0)


main()
