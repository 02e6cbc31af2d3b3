"""A training of which each rank has a part of the state alone. It ends only when it is killed.

Variables: BENCH_KIND, one of those in kinds.py; BENCH_LOSE_AT_MOST, the Keeper's `lose_at_most`, if there is one.
"""

import os

import demo

demo.mark("script")

import kinds  # noqa: E402
import torch.distributed as dist  # noqa: E402

from elaunch.trainer import Keeper  # noqa: E402

demo.mark("torch")
dist.init_process_group("gloo")
demo.mark("group")

model, optimizer, hook_state = kinds.spread(os.environ["BENCH_KIND"], demo.network(), lr=3e-4)
steps = os.environ.get("BENCH_LOSE_AT_MOST")
with Keeper(
    model,
    optimizer,
    hook_state=hook_state,
    lose_at_most=int(steps) if steps else None,
    warm_up=lambda: demo.loss(model, 0).backward(),
) as keeper:
    demo.train(keeper, model, optimizer)
