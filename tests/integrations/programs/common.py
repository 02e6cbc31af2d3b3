"""What the programs share: `PROGRAM FOLDER KILLS OPTIONS`, the last two as JSON.

KILLS has for each generation [rank, step, moment] of the worker that kills itself. OPTIONS: `accumulate` (batches for a
step), `evaluates`, `workers` (of the DataLoader), `persistent`, `callback` and `manual` (Lightning's).
Each rank writes what it ended with into FOLDER.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from elaunch.trainer import Keeper

FOLDER = Path(sys.argv[1])
KILLS = json.loads(sys.argv[2])
OPTIONS: dict[str, Any] = {
    "accumulate": 1,
    "evaluates": False,
    "workers": 0,
    "persistent": False,
    **json.loads(sys.argv[3]),
}
GENERATION = int(os.environ["ELAUNCH_GENERATION"])
RANK = int(os.environ["RANK"])
EPOCHS = 3

# The loss of each step that this process computed.
losses: dict[int, float] = {}


def strike(moment: str, step: int) -> None:
    """Die here, if that is asked for."""
    if len(KILLS) > GENERATION and KILLS[GENERATION] == [RANK, step, moment]:
        os.kill(os.getpid(), signal.SIGKILL)


def network() -> nn.Module:
    """With buffers and random numbers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))


def samples() -> Dataset[Any]:
    """10 batches of 4 for each of 2 ranks."""
    return (Noisy if "mixed" in OPTIONS else TensorDataset)(
        torch.randn(80, 8, generator=torch.Generator().manual_seed(2))
    )


class Noisy(TensorDataset):
    """Draws noise for each sample."""

    def __getitem__(self, index: int) -> Any:
        return (super().__getitem__(index)[0] + 0.1 * torch.randn(8),)


class Mixed(Sampler[int]):
    """Draws each index from all that a sampler may draw from: global generators, its own, and a counter."""

    def __init__(self) -> None:
        self.own, self.drawn = random.Random(7), 0
        random.seed(5 + RANK)

    def __len__(self) -> int:
        return 80

    def __iter__(self) -> Iterator[int]:
        for _ in range(80):
            self.drawn += 1
            yield (int(torch.randint(80, ())) + random.randrange(80) + self.own.randrange(80) + self.drawn) % 80


class ByTheClock(Mixed):
    """Draws what no restart can know."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(os.urandom(8)).sample(range(80), 80))


def collated(items: list[Any]) -> list[torch.Tensor]:
    """A batch, with noise from Python's generator."""
    return [torch.stack([item[0] for item in items]) + random.random()]


def loader(*, shuffle: bool = True) -> DataLoader[Any]:
    """The samples in batches."""
    more: dict[str, Any] = {"num_workers": OPTIONS["workers"], "persistent_workers": OPTIONS["persistent"]}
    if not shuffle or not OPTIONS.keys() & {"mixed", "clock"}:
        return DataLoader(samples(), batch_size=4, shuffle=shuffle, **more)
    sampler = Mixed() if "mixed" in OPTIONS else ByTheClock()
    return DataLoader(samples(), batch_size=4, sampler=sampler, collate_fn=collated, **more)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean squared error for the sum of the inputs."""
    return (model(batch).squeeze(-1) - batch.sum(1)).pow(2).mean()


def evaluate(model: nn.Module, batch: torch.Tensor, keeper: Keeper) -> None:
    """An evaluation, if the options have one. It may draw random numbers, and its pass ends the last commit."""
    if OPTIONS["evaluates"]:
        model.eval()
        with torch.no_grad():
            loss_of(model, batch) + torch.rand(1)
            strike("evaluation", keeper.step)
        model.train()


def finish(step: int, *states: object) -> None:
    """Write down how this rank has ended."""
    content = io.BytesIO()
    torch.save(states, content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps({"digest": digest, "step": step, "losses": losses}))
