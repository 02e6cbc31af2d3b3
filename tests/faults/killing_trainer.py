"""The bundled trainer, struck where the test asks for it: `killing_trainer.py FOLDER [OPTION …]`, its own options.

See moments.py for FOLDER. The moments of a step:

    forward       before a forward pass
    loss          all gradients are summed, the loss is not

and with step 0:

    measuring     before a plan is measured

Each rank records `began` (with the step that was restored, and the memory's folder), `requested` (to stop) and `ended`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from moments import Moments, fix_steps

from elaunch.trainer import train
from elaunch.trainer.__main__ import main
from elaunch.trainer.gpt.recorder import Recorder
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.parallel import build as plans

MOMENTS = Moments(Path(sys.argv[1]))


class StruckKeeper(Keeper):
    """A keeper that records its start. `entered` is the keeper in use, if there is one."""

    entered: Keeper | None = None

    def __enter__(self) -> Keeper:
        super().__enter__()
        StruckKeeper.entered = self
        MOMENTS.record("began", step=self.step, memory=os.environ.get("ELAUNCH_MEMORY"))
        return self


def now() -> int:
    """The step that is computed now. 0 while the keeper warms up and restores."""
    return StruckKeeper.entered.step + 1 if StruckKeeper.entered else 0


def plant() -> None:
    """Put all moments in place."""
    train.Keeper = StruckKeeper  # type: ignore[misc]
    # A request to stop is obeyed after the step in which it comes: tests name that step.
    fix_steps(looks=True)
    MOMENTS.before(plans, "try_plan", "measuring", lambda: 0)
    MOMENTS.before(Recorder, "mean_loss", "loss", now)
    MOMENTS.record_stops()
    build = train.build

    def built(*args: Any) -> Any:
        parallel = build(*args)
        model: torch.nn.Module = parallel.model
        model.register_forward_pre_hook(lambda *_: MOMENTS.strike("forward", now()) if model.training else None)
        return parallel

    train.build = built


if __name__ == "__main__":
    plant()
    code = main(sys.argv[2:])
    MOMENTS.record("ended", code=code)
    sys.exit(code)
