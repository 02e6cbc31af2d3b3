"""A loop of one's own with torchdata's StatefulDataLoader, or with a plain DistributedSampler and `Batches`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from common import EPOCHS, OPTIONS, RANK, finish, loss_of, losses, network, samples, strike
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from elaunch.trainer import Batches, Keeper

dist.init_process_group("gloo")
sampler = DistributedSampler(samples(), seed=3)
kind = StatefulDataLoader if OPTIONS["stateful"] else DataLoader
loader = kind(samples(), batch_size=4, sampler=sampler, num_workers=OPTIONS["workers"])
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(5 + RANK)


def in_epochs(first: int) -> Iterator[torch.Tensor]:
    """The batches of a loader that continues an epoch, but not the number of that epoch."""
    sampler.set_epoch(first)
    # An iterator draws a seed, and this one is not in the run that is left alone: before `steps`.
    iterator = iter(loader)

    def rest() -> Iterator[torch.Tensor]:
        for (batch,) in iterator:
            yield batch
        # A loader that is restored at the end of an epoch gives nothing in the next one.
        gave_nothing = keeper.step == first * len(loader)
        for epoch in range(first if gave_nothing else first + 1, EPOCHS):
            sampler.set_epoch(epoch)
            for (batch,) in loader:
                yield batch

    return rest()


def in_batches(batches: Batches) -> Iterator[torch.Tensor]:
    for (batch,) in batches:
        yield batch


position = loader if OPTIONS["stateful"] else Batches(loader)
with Keeper(model, optimizer, per_rank=position) as keeper:
    source = in_epochs(keeper.step // len(loader)) if OPTIONS["stateful"] else in_batches(position)
    for step in keeper.steps(EPOCHS * len(loader)):
        loss = loss_of(model, next(source))
        strike("forward", step)
        loss.backward()
        with keeper.commit():
            optimizer.step()
            strike("commit", step)
            optimizer.zero_grad()
        losses[step] = loss.item()
finish(keeper.step, model.state_dict(), optimizer.state_dict())
