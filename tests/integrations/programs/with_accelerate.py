"""A loop with Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import EPOCHS, OPTIONS, RANK, evaluate, finish, loader, loss_of, losses, network, strike

from elaunch.trainer.integrations.accelerate import keep

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=OPTIONS["accumulate"])
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
# Accelerate draws the seed of its sampler.
torch.manual_seed(5)
model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
torch.manual_seed(5 + RANK)

with keep(accelerator, model, optimizer, batches, scheduler) as kept:
    for _ in kept.epochs(EPOCHS):
        for (batch,) in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                step = kept.keeper.step + 1
                strike("forward", step)
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    strike("commit", step)
                scheduler.step()
                optimizer.zero_grad()
                losses[step] = loss.item()
        evaluate(model, batch, kept.keeper)
finish(kept.keeper.step, model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
