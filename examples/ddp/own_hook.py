"""A communication hook of your own: each rank sends a hundredth of its gradient, and keeps the rest for later.

    elaunch --nproc-per-node 2 examples/ddp/own_hook.py

What a rank has not sent is a state of that rank alone (error feedback; Stich et al., "Sparsified SGD with memory",
2018). The Keeper keeps it as `hook_state`: kill a worker, and the job goes on as if nothing had happened.
"""

import gc
import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import Keeper

# torch 2.13 has another name for it, and warns at the old one.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TopK:
    """The hook and its state. `share` of each bucket's elements is sent, by their size."""

    def __init__(self, group: dist.ProcessGroup | None, share: float = 0.01) -> None:
        self.group, self.share = group or dist.group.WORLD, share
        self.unsent: dict[int, Tensor] = {}

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradient = bucket.buffer()
        unsent = self.unsent.get(bucket.index())
        # DDP makes other buckets after the first step.
        if unsent is not None and unsent.numel() == gradient.numel():
            gradient.add_(unsent)
        count = max(1, int(self.share * gradient.numel()))
        indices = gradient.abs().topk(count).indices
        # Numbers and values travel as one tensor: one collective, whose order is the same on all ranks.
        message = torch.cat([gradient[indices], indices.to(torch.int32).view(torch.float32)])
        received = message.new_empty(self.group.size() * message.numel())
        self.unsent[bucket.index()] = gradient.index_fill(0, indices, 0.0)
        work = all_gather(received, message, group=self.group, async_op=True)

        def mean(done: torch.futures.Future[Any]) -> Tensor:
            done.value()
            gradient.zero_()
            for values, its in received.view(self.group.size(), 2, count):
                gradient.index_add_(0, its.contiguous().view(torch.int32), values)
            return gradient.div_(self.group.size())

        return work.get_future().then(mean)

    def state_dict(self) -> dict[str, Any]:
        return {"unsent": self.unsent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.unsent = state["unsent"]


def top_k_hook(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return state(bucket)


def train(steps: int) -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    print(f"rank {rank} has pid {os.getpid()}", flush=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    state = TopK(None)
    model.register_comm_hook(state, top_k_hook)

    def loss_of(step: int) -> Tensor:
        source = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 64, generator=source).to(device)
        return (model(inputs) - inputs.sum(1, keepdim=True) / 8).square().mean()

    warm_up = lambda: loss_of(0).backward()  # noqa: E731
    # A copy of each step: then a dead worker costs none.
    with Keeper(model, optimizer, hook_state=state, per_rank=(), lose_at_most=0, warm_up=warm_up) as keeper:
        for step in keeper.steps(steps):
            loss = loss_of(step)
            loss.backward()
            with keeper.commit():
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0 and step % 20 == 0:
                print(f"step {step}: loss {float(loss.detach()):.4f}", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
    digest = hashlib.sha256(bytes(weights.view(torch.uint8).tolist())).hexdigest()[:16]
    sent = sum(max(1, int(state.share * its.numel())) for its in state.unsent.values())
    if rank == 0:
        print(f"a step sends {8 * sent:,} bytes from each rank, of {4 * weights.numel():,} bytes of gradient")
    print(f"rank {rank} ends with weights {digest}", flush=True)


def main(steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(steps)
    # DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
