"""DataParallel beside DDP: one process that copies the model to all GPUs in each step, or a process for each GPU.

    elaunch --nproc-per-node gpu examples/ddp/data_parallel.py

On a machine with GPUs it prints samples per second of DataParallel (rank 0 drives all GPUs, the others wait) and of
DDP, with the same batch over all GPUs, and their ratio. Without GPUs there is nothing to compare, since DataParallel
is then the module itself; the script checks that, and says so. torch advises against DataParallel: the threads of its
one process share Python's lock, each step copies all weights to each GPU, and the first GPU gathers all outputs.
"""

import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

WIDTH, LAYERS, BATCH_PER_GPU = 2048, 8, 256


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def samples_per_s(model: nn.Module, inputs: Tensor, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps + 5):
        if step == 5:
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return steps * len(inputs) / (time.perf_counter() - begun_s)


def without_gpus() -> None:
    module = nn.Linear(4, 4)
    inputs = torch.randn(8, 4)
    assert torch.equal(DataParallel(module)(inputs), module(inputs))
    if dist.get_rank() == 0:
        print("no GPU: DataParallel is the module itself; DDP divides the batch among processes on CPUs too")
        print("with GPUs this prints: GPUs, samples/s of DataParallel, samples/s of DDP, their ratio")


def with_gpus(steps: int) -> None:
    ranks, device = dist.get_world_size(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    threads = 0.0
    if dist.get_rank() == 0:
        whole_batch = torch.randn(ranks * BATCH_PER_GPU, WIDTH, device=device)
        threads = samples_per_s(DataParallel(network().to(device)), whole_batch, steps)
    dist.barrier()
    model = DistributedDataParallel(network().to(device), device_ids=[device.index])
    processes = ranks * samples_per_s(model, torch.randn(BATCH_PER_GPU, WIDTH, device=device), steps)
    if dist.get_rank() == 0:
        print(f"{ranks} GPUs: DataParallel {threads:,.0f} samples/s, DDP {processes:,.0f} samples/s, "
              f"{processes / threads:.2f} times as many", flush=True)  # fmt: skip


def main(steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        with_gpus(steps)
    else:
        without_gpus()
    # DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
