"""What the programs share: how many steps they make, and what a step says. Nothing of it is elaunch's.

`PROGRAM_STEPS` is the number of steps. With `PROGRAM_FAILS` the last rank raises an exception in its third step.
From step 30 on each step waits until the file `PROGRAM_HELD_UNTIL` is there, if that is set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STEPS = int(os.environ.get("PROGRAM_STEPS", "30"))
_STEP_S = 0.03
_HELD_FROM = 30


def step(number: int) -> None:
    """The end of a step: say so, and rest a moment."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    print(f"step {number} rank {rank} pid {os.getpid()} at {time.monotonic():.6f}", flush=True)
    if os.environ.get("PROGRAM_FAILS") and rank == size - 1 and number >= 3:
        raise RuntimeError("this step fails")
    time.sleep(_STEP_S)
    held_until = os.environ.get("PROGRAM_HELD_UNTIL")
    while held_until and number >= _HELD_FROM and not Path(held_until).exists():
        time.sleep(_STEP_S)


def train(model, optimizer, inputs, after=None) -> None:
    """The plain loop: `inputs()` makes a batch, `after(number, loss)` is called before a step ends."""
    for number in range(1, STEPS + 1):
        loss = model(inputs()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after:
            after(number, loss)
        step(number)
