"""A loop with Fabric."""

from __future__ import annotations

import torch
from common import EPOCHS, OPTIONS, RANK, evaluate, finish, loader, loss_of, losses, network, strike
from lightning.fabric import Fabric

from elaunch.trainer.integrations.fabric import keep

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
model, optimizer = fabric.setup(model, optimizer)
batches = fabric.setup_dataloaders(loader())
torch.manual_seed(5 + RANK)
each = OPTIONS["accumulate"]

with keep(model, optimizer, batches, scheduler, accumulate=each) as kept:
    for _ in kept.epochs(EPOCHS):
        # After a restart the first epoch may have fewer batches.
        done = kept.done
        for number, (batch,) in enumerate(batches, done + 1):
            steps = number % each == 0 or number == len(batches)
            with fabric.no_backward_sync(model, enabled=not steps):
                loss = loss_of(model, batch)
                step = kept.keeper.step + 1
                strike("forward", step)
                fabric.backward(loss)
            losses[step] = loss.item()
            if steps:
                optimizer.step()
                strike("commit", step)
                scheduler.step()
                optimizer.zero_grad()
        evaluate(model, batch, kept.keeper)
finish(kept.keeper.step, model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
