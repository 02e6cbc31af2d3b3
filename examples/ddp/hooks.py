"""All communication hooks on one model: what a step takes with each, and how exact the gradients are.

    elaunch --nproc-per-node 2 examples/ddp/hooks.py

`noop` exchanges nothing: its step is the floor, and what is above it is the exchange that the backward pass did not
hide. It is for measuring only, as each rank then trains a model of its own. The times are of this machine and this
model; with gloo on one host an exchange costs CPU time, so compression seldom pays there.
"""

import gc
import os
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, BATCH = 6, 256, 32
# The largest relative error of the sum of all gradients. What PowerSGD leaves out of one step goes into the next ones.
HOOKS = {"none": 0.0, "fp16": 1e-2, "bf16": 1e-2, "powersgd": 1.0}


def bf16_hook(group, bucket):
    """torch's hook. DDP refuses it by its name in a torch without CUDA, although gloo can add bfloat16."""
    return bf16_compress_hook(group, bucket)


def step_of(name: str, device: torch.device, steps: int) -> tuple[float, list[Tensor]]:
    """The median time of a step, the slowest rank's, and the sum of all steps' gradients, which are alike."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    # With gloo and several buckets, torch's PowerSGD hangs: it starts collectives in another order on each rank.
    model = DistributedDataParallel(
        module, device_ids=[device] if device.type == "cuda" else None, bucket_cap_mb=100 if name == "powersgd" else 0.5
    )
    if name == "powersgd":
        state = PowerSGDState(None, 4, start_powerSGD_iter=2, orthogonalization_epsilon=1e-20)
        model.register_comm_hook(state, powerSGD_hook)
    elif name != "none":
        model.register_comm_hook(None, {"noop": noop_hook, "fp16": fp16_compress_hook, "bf16": bf16_hook}[name])
    source = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(BATCH, WIDTH, generator=source).to(device)
    seconds, sums = [], [torch.zeros_like(parameter) for parameter in module.parameters()]
    for _ in range(steps):
        model.zero_grad()
        dist.barrier()
        begun_s = time.perf_counter()
        model(inputs).square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun_s)
        for total, parameter in zip(sums, module.parameters(), strict=True):
            total += parameter.grad
    # The first steps make the buckets, and PowerSGD begins after them.
    slowest = torch.tensor(median(seconds[3:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest), sums


def main(steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    floor_s, _ = step_of("noop", device, steps)
    lines, exact = [f"{'noop':<18}{1000 * floor_s:8.2f} ms {0:8.2f} ms    (each rank alone)"], None
    for name, error_max in HOOKS.items():
        took_s, sums = step_of(name, device, steps)
        flat = torch.cat([total.flatten() for total in sums])
        exact = flat if exact is None else exact
        error = float((flat - exact).norm() / exact.norm())
        # All ranks must have the same gradients to the bit, or their models drift apart.
        first = flat.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, flat), name
        assert error <= error_max, (name, error)
        lines.append(f"{name:<18}{1000 * took_s:8.2f} ms {1000 * (took_s - floor_s):8.2f} ms    {error:.1e}")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {4 * flat.numel() / 2**20:.1f} MiB of gradients, {steps} steps each")
        print(f"{'hook':<18}{'step':>11}{'above noop':>12}    relative error of the sum of all gradients")
        print("\n".join(lines), flush=True)
    # DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
