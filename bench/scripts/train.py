"""The script that every launcher runs: a group, an all-reduce, a model, optimizer steps. It stamps each stage.

Each rank takes a GPU and NCCL if there is one for each rank of the node, else gloo and a CPU.

Variables: BENCH_STAMPS, the file for the stamps; BENCH_STEPS, how many steps to make (0: until it is killed);
BENCH_STEP_S, the pause between two steps, as if an accelerator were at work; BENCH_DEVICE=cpu, to leave GPUs alone,
and =shared, to use GPUs for all ranks, which share one if there are too few.
"""

import os
import time

from demo import RANK, mark

mark("script")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import AdamW  # noqa: E402

mark("torch")

where = os.environ.get("BENCH_DEVICE", "")
if where == "shared" or (where != "cpu" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])):
    import devices

    device = devices.make_context()
    mark("context")
    devices.join_group()
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
mark("group")

total = torch.tensor([RANK + 1], device=device)
dist.all_reduce(total)
size = dist.get_world_size()
assert int(total) == size * (size + 1) // 2
mark("all_reduce")

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
model = DistributedDataParallel(layers, device_ids=[device.index] if device.type == "cuda" else None)
optimizer = AdamW(model.parameters())
steps, pause_s = int(os.environ["BENCH_STEPS"]), float(os.environ["BENCH_STEP_S"])
done = 0
while not steps or done < steps:
    model(torch.ones(8, 256, device=device)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    if device.type == "cuda" and done in (1, 4):
        # A step is made when the GPU has made it.
        torch.cuda.synchronize()
    if done == 1:
        mark("step")
    elif done == 4:
        mark("training")
    if done != steps:
        time.sleep(pause_s)
dist.destroy_process_group()
