"""Tries compiled plans one after the other in the same ranks, as `--parallel auto --compile` does.

Run as `trial_ranks.py PLAN…` by each rank. Each prints, for each plan, the graphs that it has compiled, and the seconds
of a step, and the bytes that it took.
"""

from __future__ import annotations

import functools
import json
import os
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.parallel.trial import try_plan
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.train import decay_groups, new_gpt

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    peers, said = Peers(), {}
    for plan in sys.argv[1:]:
        config = TrainConfig(
            parallel=plan, compile=True, layers=4, heads=4, width=32, context=16, micro_batch=2, global_batch=8
        )
        sizes = config.sizes(RankInfo(RANK, RANK, WORLD_SIZE))
        trial = try_plan(
            *(config, sizes, RANK, CPU, peers),
            new_gpt=functools.partial(new_gpt, config, CPU),
            groups=decay_groups,
        )
        graphs = counters["stats"].pop("unique_graphs", 0)
        said[plan] = {"graphs": graphs, "step_s": trial.step_s, "memory": trial.memory}
    print(json.dumps(said), flush=True)
    dist.barrier()
    # The groups' threads may wait for the interpreter (pytorch #190489).
    os._exit(0)


main()
