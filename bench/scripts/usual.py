"""The same training as a usual script: rank 0 saves every few steps, and all ranks load at the start.

Variables: BENCH_SAVE_EVERY, the number of steps between two saves. It ends when it is killed.
"""

import os

import demo

demo.mark("script")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import AdamW  # noqa: E402

demo.mark("torch")
dist.init_process_group("gloo")
demo.mark("group")

network = demo.network()
model = DistributedDataParallel(network)
optimizer = AdamW(model.parameters(), lr=3e-4)
save_every, path = int(os.environ["BENCH_SAVE_EVERY"]), "checkpoint.pt"
step = 0
if os.path.exists(path):  # noqa: PTH110
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
demo.mark("restored", step)

while True:
    step += 1
    demo.loss(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    demo.mark("done", step)
    if demo.RANK == 0 and step % save_every == 0:
        # Written beside the old file and renamed: a kill in the middle leaves the old file.
        torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
        os.replace(path + ".new", path)  # noqa: PTH105
