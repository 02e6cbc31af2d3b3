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
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def samples() -> TensorDataset:
    """10 batches of 4 for each of 2 ranks."""
    return TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(2)))


def loader(*, shuffle: bool = True) -> DataLoader[Any]:
    """The samples in batches."""
    workers: dict[str, Any] = {"num_workers": OPTIONS["workers"], "persistent_workers": OPTIONS["persistent"]}
    return DataLoader(samples(), batch_size=4, shuffle=shuffle, **workers)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean squared error for the sum of the inputs."""
    return (model(batch).squeeze(-1) - batch.sum(1)).pow(2).mean()


def finish(step: int, *states: object) -> None:
    """Write down how this rank has ended."""
    content = io.BytesIO()
    torch.save(states, content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps({"digest": digest, "step": step, "losses": losses}))
