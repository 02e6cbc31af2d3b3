"""A training of which each rank has a part of the state alone. It ends only when it is killed.

Variables: BENCH_KIND, one of those in kinds.py; BENCH_COPY_EVERY, the Keeper's `copy_every`, if there is one.
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
every = os.environ.get("BENCH_COPY_EVERY")
with Keeper(
    model,
    optimizer,
    hook_state=hook_state,
    copy_every=int(every) if every else None,
    warm_up=lambda: demo.loss(model, 0).backward(),
) as keeper:
    demo.train(keeper, model, optimizer)
