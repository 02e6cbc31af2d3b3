"""The script that every launcher runs: a group, an all-reduce, a model, optimizer steps. It stamps each stage.

Each rank takes a GPU and NCCL if there is one for each rank of the node, else gloo and a CPU.

Variables: BENCH_STAMPS, the file for the stamps; BENCH_STEPS, how many steps to make (0: until it is killed);
BENCH_STEP_S, the pause between two steps, as if an accelerator were at work; BENCH_DEVICE=cpu, to leave GPUs alone.
"""

import json
import os
import time

RANK = int(os.environ["RANK"])
# Each of torchrun's nodes counts restarts for itself. On one node the count is the same as elaunch's generation.
GENERATION = int(os.environ.get("ELAUNCH_GENERATION") or os.environ["TORCHELASTIC_RESTART_COUNT"])
STAMPS_FD = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def stamp(event: str) -> None:
    fields = {"generation": GENERATION, "event": event, "monotonic_s": time.monotonic(), "rank": RANK}
    # One write to a file in append mode: no other rank's line can cut this one.
    os.write(STAMPS_FD, json.dumps({**fields, "pid": os.getpid()}).encode() + b"\n")


stamp("script")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import AdamW  # noqa: E402

stamp("torch")

device = torch.device("cpu")
if os.environ.get("BENCH_DEVICE") != "cpu" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
    stamp("context")

dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
stamp("group")

total = torch.tensor([RANK + 1], device=device)
dist.all_reduce(total)
size = dist.get_world_size()
assert int(total) == size * (size + 1) // 2
stamp("all_reduce")

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
        stamp("step")
    elif done == 4:
        stamp("training")
    if done != steps:
        time.sleep(pause_s)
dist.destroy_process_group()
