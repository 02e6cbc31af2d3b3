"""Lightning Fabric: one's own loop, with Fabric's set-up."""

import torch
from common import STEPS, step
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(1)
model = torch.nn.Linear(16, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(16 * STEPS, 16)), batch_size=8))
for number, (inputs,) in enumerate(loader, 1):
    loss = model(inputs).square().mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    step(number)
