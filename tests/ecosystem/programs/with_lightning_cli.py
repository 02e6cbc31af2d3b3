"""LightningCLI: the command line is made from the classes. The last checkpoint is where a restart goes on."""

import torch
from common import STEPS, step
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self, width: int = 16, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=8)


class Steps(Callback):
    def on_train_batch_end(self, trainer, *_):
        step(trainer.global_step)


if __name__ == "__main__":
    defaults = {
        "accelerator": "cpu",
        "strategy": "ddp",
        "devices": 2,
        "max_steps": STEPS,
        "enable_progress_bar": False,
        "logger": False,
    }
    saving = ModelCheckpoint("checkpoints", every_n_train_steps=10, save_last=True)
    overwrites = {"overwrite": True}
    LightningCLI(
        Model, Data, save_config_kwargs=overwrites, trainer_defaults={**defaults, "callbacks": [Steps(), saving]}
    )
