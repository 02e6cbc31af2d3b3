"""Post-local SGD: whole gradients at first, later steps of each rank alone with an average after every few of them.

    elaunch --nproc-per-node 2 examples/ddp/local_sgd.py

Between two averages each rank has weights of its own, and no rank has the state of the job. So one step of the Keeper
is a round that ends with an average, of the weights and of AdamW's moments (Lin et al., "Don't use large mini-batches,
use local SGD", 2020; torch's PostLocalSGDOptimizer averages the weights alone). The round is one commit. A rank that
dies in it costs the round: the job goes on from the snapshot of the last average.
"""

import gc
import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import Keeper

STEPS_PER_ROUND, WHOLE_ROUNDS = 5, 2


def average(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks, in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def spread(parameters: list[Tensor]) -> float:
    """How far this rank's weights are from the mean of all ranks."""
    own = torch.cat([parameter.detach().flatten() for parameter in parameters])
    mean = own.clone()
    average([mean])
    return float((own - mean).norm())


def train(rounds: int) -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    print(f"rank {rank} has pid {os.getpid()}", flush=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The hook counts backward passes. After the first it leaves gradients as they are.
    state = PostLocalSGDState(None, None, WHOLE_ROUNDS * STEPS_PER_ROUND, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    parameters = list(model.parameters())

    def loss_of(step: int) -> Tensor:
        source = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 16, generator=source).to(device)
        return (model(inputs) - inputs.sum(1, keepdim=True) / 4).square().mean()

    warm_up = lambda: loss_of(0).backward()  # noqa: E731
    with Keeper(model, optimizer, per_rank=(), lose_at_most=1, warm_up=warm_up) as keeper:
        for number in keeper.steps(rounds):
            state.iter = (number - 1) * STEPS_PER_ROUND
            with keeper.commit():
                for step in range(state.iter, state.iter + STEPS_PER_ROUND):
                    loss = loss_of(step)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                apart = spread(parameters)
                moments = [its[name] for its in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
                with torch.no_grad():
                    average(parameters + moments)
            is_whole = number <= WHOLE_ROUNDS
            assert (apart < 1e-5) == is_whole, apart
            if rank == 0 and (number % 10 == 0 or is_whole):
                kind = "whole gradients" if is_whole else f"{STEPS_PER_ROUND} local steps"
                print(f"round {number}: {kind}, loss {float(loss.detach()):.4f}, apart {apart:.2g}", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters]).cpu()
    digest = hashlib.sha256(bytes(weights.view(torch.uint8).tolist())).hexdigest()[:16]
    if rank == 0:
        print(f"a local round sends its weights and moments once: 3/{STEPS_PER_ROUND} of the bytes of whole gradients")
    print(f"rank {rank} ends with weights {digest}", flush=True)


def main(rounds: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(rounds)
    # DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
