"""One loop with each form of torch's parallel training: `forms.py FORM`. A form makes a model and its optimizer."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))


def ddp():
    model = DistributedDataParallel(net())
    return model, AdamW(model.parameters())


def comm_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, SGD(model.parameters(), lr=0.01)


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)


def local_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(net())
    alone, _ = dist.new_subgroups(group_size=1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=5), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=5)
    return model, PostLocalSGDOptimizer(SGD(model.parameters(), lr=0.01), averager)


def fsdp():
    model = FullyShardedDataParallel(net(), auto_wrap_policy=size_based_auto_wrap_policy, device_id=torch.device("cpu"))
    return model, AdamW(model.parameters())


def fsdp2():
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, AdamW(model.parameters())


def tensor_parallel():
    torch.manual_seed(0)
    model = parallelize_module(net(), init_device_mesh("cpu", (dist.get_world_size(),)), PLAN)
    return model, AdamW(model.parameters(), foreach=True)


def mesh_2d():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(net(), mesh["tensor"], PLAN)
    fully_shard(model, mesh=mesh["data"])
    return model, AdamW(model.parameters())


dist.init_process_group("gloo")
form = sys.argv[1]
model, optimizer = globals()["ddp" if form == "join" else form]()
# Uneven inputs: ranks that are done early wait for the others.
extra = 5 * dist.get_rank() if form == "join" else 0
with Join([model]) if form == "join" else nullcontext():
    for number in range(1, STEPS + extra + 1):
        if form in ("tensor_parallel", "mesh_2d"):
            # The ranks of a tensor need the same inputs.
            torch.manual_seed(number)
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step(number)
if form == "zero":
    optimizer.consolidate_state_dict(to=0)
dist.destroy_process_group()
