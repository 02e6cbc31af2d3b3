"""A LightningModule and its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from common import EPOCHS, FOLDER, OPTIONS, RANK, finish, loader, loss_of, losses, network, samples, strike
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader, Subset

from elaunch.trainer.integrations.lightning import ElaunchCallback


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.automatic_optimization = "manual" not in OPTIONS

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        step = self.trainer.global_step + 1
        strike("forward", step)
        loss = loss_of(self.net, batch[0])
        losses[step] = loss.item()
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        # Validations may draw random numbers.
        self.log("validation", loss_of(self.net, batch[0]) + torch.rand(1), sync_dist=True)
        strike("evaluation", self.trainer.global_step)

    def on_validation_end(self) -> None:
        strike("validated", self.trainer.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strike("commit", self.trainer.global_step + 1)

    def on_train_batch_end(self, *_: Any) -> None:
        strike("committed", self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        interval = "epoch" if OPTIONS["accumulate"] > 1 else "step"
        return [optimizer], [{"scheduler": scheduler, "interval": interval}]


more: dict[str, Callable[[], pl.Callback]] = {
    "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    # Nothing is better than the first loss.
    "stopping": lambda: callbacks.EarlyStopping("validation", min_delta=1e9, patience=1, mode="max"),
    "swa": lambda: callbacks.StochasticWeightAveraging(1e-3),
    "average": lambda: callbacks.WeightAveraging(),
    "finetuning": lambda: callbacks.BackboneFinetuning(),
    "rate": lambda: callbacks.LearningRateFinder(),
}
module = Module()
torch.manual_seed(5 + RANK)
trainer = pl.Trainer(
    max_epochs=EPOCHS,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    callbacks=[ElaunchCallback(), *([more[OPTIONS["callback"]]()] if "callback" in OPTIONS else [])],
    logger=False,
    default_root_dir=FOLDER,
    enable_progress_bar=False,
    accumulate_grad_batches=OPTIONS["accumulate"],
    reload_dataloaders_every_n_epochs=OPTIONS.get("reload", 0),
)
half = DataLoader(Subset(samples(), range(40)), batch_size=4)
trainer.fit(
    module,
    [loader(), half] if "cycle" in OPTIONS else loader(),
    loader(shuffle=False) if OPTIONS["evaluates"] else None,
)
scheduler = trainer.lr_scheduler_configs[0].scheduler
finish(trainer.global_step, module.state_dict(), trainer.optimizers[0].state_dict(), scheduler.state_dict())
