"""Accelerate: one's own loop, prepared by an Accelerator."""

import torch
from accelerate import Accelerator
from common import STEPS, step
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = DataLoader(TensorDataset(torch.randn(16 * STEPS, 16)), batch_size=8, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for number, (inputs,) in enumerate(loader, 1):
    with accelerator.accumulate(model):
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    step(number)
accelerator.print("loss", accelerator.gather(loss.detach()).mean().item())
accelerator.end_training()
