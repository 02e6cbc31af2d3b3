"""Buffers, and batch normalisation over the batches of all ranks.

    elaunch --nproc-per-node 2 examples/ddp/batch_norm.py

DDP sends rank 0's buffers to all ranks before each forward pass, and never averages them. SyncBatchNorm normalises
with the mean and variance of all ranks' samples. torch's works on GPUs only; on CPUs this script uses the same formula
as a module of its own.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


class SumOverRanks(torch.autograd.Function):
    """An all-reduce with a gradient: that of all ranks' losses together."""

    @staticmethod
    def forward(context: object, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return SumOverRanks.apply(gradient)


class SynchronisedNorm(nn.BatchNorm1d):
    """nn.SyncBatchNorm for CPUs: sums, squares and counts of all ranks make one mean and one variance."""

    def forward(self, inputs: Tensor) -> Tensor:
        count = torch.full((1, inputs.shape[1]), float(len(inputs)))
        sums = torch.stack([inputs.sum(0), inputs.square().sum(0), count[0]])
        total, squares, counts = SumOverRanks.apply(sums)
        mean = total / counts
        variance = squares / counts - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * counts / (counts - 1), self.momentum)
        return (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def buffers_come_from_rank_0() -> None:
    norm = nn.BatchNorm1d(1, device=device)
    model = DistributedDataParallel(norm)
    # The batch of rank r has the mean r + 1. Each forward pass moves the running mean a tenth of the way to it.
    inputs = torch.tensor([[0.0], [2.0]], device=device) + RANK
    model(inputs)
    first = float(norm.running_mean)
    model(inputs)
    second = float(norm.running_mean)
    assert abs(first - 0.1 * (RANK + 1)) < 1e-6, first
    # Before the second pass all ranks had rank 0's 0.1.
    assert abs(second - (0.9 * 0.1 + 0.1 * (RANK + 1))) < 1e-6, second
    if RANK == WORLD_SIZE - 1:
        print(f"rank {RANK}'s running mean: {first:.2f}, then {second:.2f}, from rank 0's 0.10", flush=True)


def statistics_of_all_ranks() -> None:
    torch.manual_seed(0)
    whole_batch = torch.randn(8 * WORLD_SIZE, 4, device=device)
    alone = nn.BatchNorm1d(4, device=device)
    expected = alone(whole_batch)
    norm = nn.SyncBatchNorm(4).to(device) if device.type == "cuda" else SynchronisedNorm(4)
    model = DistributedDataParallel(norm)

    outputs = model(whole_batch[RANK::WORLD_SIZE])
    outputs.square().sum().backward()
    expected.square().sum().backward()

    assert torch.allclose(outputs, expected[RANK::WORLD_SIZE], atol=1e-5)
    assert torch.allclose(norm.running_var, alone.running_var, atol=1e-5)
    # DDP has divided the sum of the ranks' gradients by their number.
    assert torch.allclose(norm.weight.grad * WORLD_SIZE, alone.weight.grad, atol=1e-4)
    if RANK == 0:
        print(f"{type(norm).__name__} over {WORLD_SIZE} ranks: outputs, buffers and gradients of one batch of "
              f"{len(whole_batch)}")  # fmt: skip


buffers_come_from_rank_0()
statistics_of_all_ranks()
# DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
gc.collect()
dist.destroy_process_group()
