"""A LightningModule with DDP that trains until it is killed. It stamps its eighth step as "training"."""

import json
import os
import time

import lightning.pytorch as pl
import torch

STAMPS_FD = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
STEPS, PAUSE_S = 8, 0.05


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).sum()
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step == STEPS:
            fields = {"generation": int(os.environ["ELAUNCH_GENERATION"]), "rank": int(os.environ["RANK"])}
            said = {**fields, "event": "training", "monotonic_s": time.monotonic(), "pid": os.getpid()}
            os.write(STAMPS_FD, json.dumps(said).encode() + b"\n")
        time.sleep(PAUSE_S)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(100_000, 4)), batch_size=2)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
devices = int(os.environ["WORLD_SIZE"])
pl.Trainer(accelerator="cpu", devices=devices, strategy="ddp", **quiet).fit(Module(), data)
