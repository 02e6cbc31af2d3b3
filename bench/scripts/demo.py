"""Shared by the scripts: the ranks' marks, and the bundled model.

Variable: BENCH_STAMPS, the file for the marks.
"""

import json
import os
import time
from typing import Any

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Each of torchrun's nodes counts restarts for itself. On one node the count is the same as elaunch's generation.
_GENERATION = int(os.environ.get("ELAUNCH_GENERATION") or os.environ["TORCHELASTIC_RESTART_COUNT"])
_STAMPS_FD = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
_PID = os.getpid()
_CONTEXT = 64
# The defaults of `elaunch -m elaunch.trainer`: a state of 10 MB.
_SHAPE, _GLOBAL_BATCH = {"layers": 4, "heads": 4, "width": 128}, 24


def mark(event: str, step: int = -1) -> None:
    """Note that this rank has reached `event` now."""
    fields = {"generation": _GENERATION, "event": event, "monotonic_s": time.monotonic(), "rank": RANK}
    # One write to a file in append mode: no other rank's line can cut this one.
    os.write(_STAMPS_FD, json.dumps({**fields, "pid": _PID, "step": step}).encode() + b"\n")


def network() -> Any:
    """The model, the same on every rank."""
    import torch

    from elaunch.trainer.gpt.model import GPT

    torch.manual_seed(0)
    return GPT(**_SHAPE, context=_CONTEXT, dropout=0.0)


def train(keeper: Any, model: Any, optimizer: Any) -> None:
    """Train within the Keeper until the job is ended, with a mark after each step."""
    mark("restored", keeper.step)
    for step in keeper.steps(10**9):
        loss(model, step).backward()
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
        mark("done", step)


def loss(model: Any, step: int) -> Any:
    """The forward pass of this rank's part of a step's batch. Step and rank decide the samples."""
    import torch

    source = torch.Generator().manual_seed(step * WORLD_SIZE + RANK)
    windows = torch.randint(256, (_GLOBAL_BATCH // WORLD_SIZE, _CONTEXT + 1), generator=source)
    return model(windows[:, :-1], windows[:, 1:])
