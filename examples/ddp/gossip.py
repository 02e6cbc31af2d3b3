"""Gossip averaging: each rank averages its weights with its two neighbours in a ring, and sums no gradients at all.

    elaunch --nproc-per-node 2 examples/ddp/gossip.py

A communication hook starts the exchange of a bucket's *weights* while the backward pass goes on, and leaves the
gradients as they are. Before the optimizer's step each rank takes the mean of what it got: x := W x - lr g (D-PSGD;
Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017). The bytes per step do not depend
on the number of ranks.

The ranks' weights are never quite equal, so no rank has the state of the job, and the Keeper cannot keep it. Each rank
has a part of it: `ShardedMemory` keeps all parts of a step, or none.
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

from elaunch.trainer import ShardedMemory
from elaunch.trainer.state.tree import PerRank

COPY_EVERY = 10


class Gossip:
    """What one step has under way: for each bucket its weights, the neighbours' weights, and the transfers."""

    def __init__(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        # Of two ranks each has one neighbour, and a single rank has none.
        self.neighbours = sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank})
        self._begun: list[tuple[list[Tensor], list[Tensor], list[Any]]] = []

    def start(self, weights: list[Tensor]) -> None:
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        theirs = [torch.empty_like(flat) for _ in self.neighbours]
        transfers = [dist.P2POp(dist.isend, flat, other) for other in self.neighbours]
        transfers += [dist.P2POp(dist.irecv, one, other) for one, other in zip(theirs, self.neighbours, strict=True)]
        self._begun.append((weights, [flat, *theirs], dist.batch_isend_irecv(transfers) if transfers else []))

    @torch.no_grad()
    def mix(self) -> None:
        """Wait for the neighbours' weights, and take the mean with them."""
        for weights, versions, transfers in self._begun:
            for transfer in transfers:
                transfer.wait()
            mean = torch.stack(versions).mean(0)
            for weight, its in zip(weights, mean.split([weight.numel() for weight in weights]), strict=True):
                weight.copy_(its.view_as(weight))
        self._begun.clear()


def gossip_hook(state: Gossip, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.start(bucket.parameters())
    own: torch.futures.Future[Tensor] = torch.futures.Future()
    own.set_result(bucket.buffer())
    return own


def apart(module: nn.Module) -> float:
    """The largest distance of a rank's weights from the mean."""
    own = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    mean = own.clone()
    dist.all_reduce(mean)
    distance = (own - mean / dist.get_world_size()).norm()
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    return float(distance)


def train(steps: int) -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    print(f"rank {rank} has pid {os.getpid()}", flush=True)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model, gossip = DistributedDataParallel(module), Gossip()
    model.register_comm_hook(gossip, gossip_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    memory = None
    state: dict[str, Any] = {"step": 0, "replicas": PerRank({f"rank {rank}": module.state_dict()})}
    if folder := os.environ.get("ELAUNCH_MEMORY"):
        memory = ShardedMemory(folder, generation=int(os.environ["ELAUNCH_GENERATION"]))
        if memory.load(state) is not None:
            module.load_state_dict(state["replicas"][f"rank {rank}"])
            print(f"rank {rank} goes on after step {state['step']}", flush=True)
    for step in range(state["step"] + 1, steps + 1):
        source = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 16, generator=source).to(device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True) / 4).square().mean()
        loss.backward()
        gossip.mix()
        optimizer.step()
        optimizer.zero_grad()
        if step % COPY_EVERY == 0:
            if memory is not None:
                memory.save(step, {"step": step, "replicas": PerRank({f"rank {rank}": module.state_dict()})})
            distance = apart(module)
            if rank == 0:
                print(f"step {step}: loss {float(loss.detach()):.4f}, ranks apart by {distance:.3f}", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).cpu()
    digest = hashlib.sha256(bytes(weights.view(torch.uint8).tolist())).hexdigest()[:16]
    before = apart(module)
    # Without gradients, mixing alone brings the ranks together.
    for _ in range(20):
        gossip.start(list(module.parameters()))
        gossip.mix()
    assert apart(module) <= before / 10 + 1e-6, (before, apart(module))
    print(f"rank {rank} ends with weights {digest}", flush=True)


def main(steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(steps)
    # DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
