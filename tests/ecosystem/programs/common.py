"""What the programs share: how many steps they make, and what a step says. Nothing of it is elaunch's.

`PROGRAM_STEPS` is the number of steps. With `PROGRAM_FAILS` the last rank raises an exception in its third step.
"""

from __future__ import annotations

import os
import time

STEPS = int(os.environ.get("PROGRAM_STEPS", "30"))
_STEP_S = 0.03


def step(number: int) -> None:
    """The end of a step: say so, and rest a moment."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    print(f"step {number} rank {rank} pid {os.getpid()} at {time.monotonic():.6f}", flush=True)
    if os.environ.get("PROGRAM_FAILS") and rank == size - 1 and number >= 3:
        raise RuntimeError("this step fails")
    time.sleep(_STEP_S)
