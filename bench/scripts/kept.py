"""A training whose state the Keeper keeps, as in docs/keeper.md. It ends only when it is killed."""

import demo

demo.mark("script")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import AdamW  # noqa: E402

from elaunch.trainer import Keeper  # noqa: E402

demo.mark("torch")
dist.init_process_group("gloo")
demo.mark("group")

model = DistributedDataParallel(demo.network())
optimizer = AdamW(model.parameters(), lr=3e-4)
warm_up = lambda: demo.loss(model, 0).backward()  # noqa: E731
with Keeper(model, optimizer, checkpoints="checkpoints", warm_up=warm_up) as keeper:
    demo.train(keeper, model, optimizer)
