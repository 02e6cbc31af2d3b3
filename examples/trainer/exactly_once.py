"""Each sample counts once: order, ledger and Keeper. Kill a worker, or start it with another --nproc-per-node."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elaunch.trainer import Keeper, Ledger, Order, accumulate
from elaunch.trainer.ledger.ledger import next_generation

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
generation = [next_generation("ledger", int(os.environ.get("ELAUNCH_GENERATION", "0")))]
dist.broadcast_object_list(generation)  # rank 0's, for all
torch.manual_seed(0)
inputs = torch.randn(1000, 32)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
order = Order(len(dataset), seed=0, global_batch=32, micro_batch=4)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
)
optimizer = torch.optim.AdamW(model.parameters())


def warm_up():
    model(torch.zeros(4, 32)).sum().backward()


with (
    Keeper(model, optimizer, checkpoints="checkpoints", warm_up=warm_up) as keeper,
    Ledger("ledger", order, rank=rank, world_size=world_size, generation=generation[0], after=keeper.step) as ledger,
):
    loader = DataLoader(dataset, batch_sampler=order.batches(rank, world_size, after=keeper.step), num_workers=1)
    batches = iter(loader)
    for step in keeper.steps(300):
        for micro in accumulate(model, order, step):
            ledger.record(step, micro)
            x, y = next(batches)
            loss = mse_loss(model(x), y)
            (loss * micro.weight).backward()
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
        ledger.commit(step)
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item()}", flush=True)
dist.destroy_process_group()
