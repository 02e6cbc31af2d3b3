"""Lightning: a LightningModule, a DataLoader, and a Trainer with its DDP strategy."""

import lightning as L
import torch
from common import STEPS, step
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        step(self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, enable_progress_bar=False)
trainer.fit(Module(), DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True))
