"""transformers.Trainer with a model of our own."""

from __future__ import annotations

from typing import Any

import torch
from common import EPOCHS, FOLDER, OPTIONS, Mixed, collated, finish, loss_of, losses, network, samples, strike
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from elaunch.trainer.integrations.transformers import ElaunchTrainerCallback

step = 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            strike("forward", step + 1)
        return {"loss": loss_of(self.net, inputs), "outputs": inputs[:, 0]}


class Striking(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        global step
        step = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        strike("commit", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        strike("committed", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Evaluations may draw random numbers.
        torch.rand(1)
        strike("evaluation", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            losses[state.global_step] = logs["loss"]


class Named(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.samples = samples()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.samples[index][0]}


def noisy(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"inputs": collated([(item["inputs"],) for item in items])[0]}


class MixedTrainer(Trainer):
    def _get_train_sampler(self, *_: Any) -> Mixed:
        return Mixed()


arguments = TrainingArguments(
    str(FOLDER),
    per_device_train_batch_size=4,
    num_train_epochs=EPOCHS,
    gradient_accumulation_steps=OPTIONS["accumulate"],
    eval_strategy="steps" if OPTIONS["evaluates"] else "no",
    eval_steps=4,
    logging_steps=1,
    learning_rate=1e-2,
    warmup_steps=5,
    seed=3,
    dataloader_num_workers=OPTIONS["workers"],
    use_cpu=True,
    ddp_backend="gloo",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = (MixedTrainer if "mixed" in OPTIONS else Trainer)(
    Model(),
    arguments,
    train_dataset=Named(),
    eval_dataset=Named(),
    data_collator=noisy if "mixed" in OPTIONS else None,
    callbacks=[ElaunchTrainerCallback(), Striking()],
)
trainer.train()
assert trainer.state.epoch == EPOCHS
finish(
    trainer.state.global_step,
    trainer.model.state_dict(),
    trainer.optimizer.state_dict(),
    trainer.lr_scheduler.state_dict(),
)
