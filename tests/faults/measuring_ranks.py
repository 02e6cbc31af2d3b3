"""Measures a worker as `--parallel auto` does, with a clock that the network's work alone drives.

A block takes a millisecond wherever it is; in a stage it takes three more, and the stage ten. An optimizer's step
takes seven. Messages take no time. Each rank prints what was measured, and how often stages were computed, by their
number of blocks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.model import Block
from elaunch.trainer.parallel import block_times
from elaunch.trainer.parallel.candidates import WorkerCount, candidates
from elaunch.trainer.parallel.speed import worker_speed
from elaunch.trainer.parallel.stages import GptStage
from elaunch.trainer.ranks.peers import Peers

WORLD_SIZE = int(os.environ["WORLD_SIZE"])


class Clock:
    """Its time is the work that was done."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.stages: Counter[int] = Counter()

    def computed(self, module: nn.Module, *_: object) -> None:
        if isinstance(module, Block):
            self.now_ms += 1
        if isinstance(module, GptStage):
            assert all(isinstance(each, FSDPModule) for each in (module, *module.blocks))
            self.now_ms += 10 + 3 * len(module.blocks)
            self.stages[len(module.blocks)] += 1

    def updated(self, *_: object) -> None:
        self.now_ms += 7


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = TrainConfig(parallel="auto", layers=4, heads=2, width=16, context=8, micro_batch=1, global_batch=4)
    plans = [each.plan for each in candidates(WorkerCount(WORLD_SIZE, WORLD_SIZE), config.shape)]
    clock = Clock()
    block_times.time = SimpleNamespace(perf_counter=lambda: clock.now_ms / 1000)  # type: ignore[assignment]
    register_module_forward_hook(clock.computed)
    register_optimizer_step_post_hook(clock.updated)
    worker = worker_speed(config, torch.device("cpu"), Peers(), plans, free=1 << 30)
    print(json.dumps({"worker": asdict(worker), "stages": clock.stages}), flush=True)
    dist.barrier()
    # The groups' threads may wait for the interpreter (pytorch #190489).
    os._exit(0)


main()
