"""Two trainings of one program that take turns, with looks as far apart as measured. Run as `looking.py FOLDER`.

The program drives the clock by which the looks are measured, so a busy machine makes no step slower.

The second one has the open form of the Keeper.
In step LAST rank 1 is asked to stop. Each rank says after which steps it looked, made snapshots and checkpoints, and
after which step each training ended.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from elaunch.trainer.checkpoint.storage import marks
from elaunch.trainer.keeper import boundary
from elaunch.trainer.keeper.boundary import Agreed, Boundary, Wants
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.version import Version

FOLDER, LAST = Path(sys.argv[1]), 75


class Part:
    """One training of the program, and what it has done after which steps."""

    def __init__(self, name: str, **options: object) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.keeper = Keeper(
            self.model,
            self.optimizer,
            per_rank=(),
            name=name,
            say=lambda _: None,
            **options,  # type: ignore[arg-type]
        )
        self.looks: list[int] = []
        self.snapshots: list[int] = []

    def step(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        dist.all_reduce(self.model.weight.grad)
        with self.keeper.commit():
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    dist.init_process_group("gloo")
    first = Part("first", checkpoints=FOLDER / "checkpoints", checkpoint_every=16, lose_at_most=20)
    second = Part("second", lose_at_most=1000)
    agreed, snapshot = Boundary.agreed, Copies.snapshot
    now_s = 0.0

    def looked(boundary: Boundary, asked: Wants) -> Agreed:
        for part in (first, second):
            if part.keeper._boundary is boundary:
                part.looks.append(part.keeper.step)
        return agreed(boundary, asked)

    def copied(copies: Copies, version: Version) -> None:
        for part in (first, second):
            if getattr(part.keeper, "_copies", None) is copies:
                part.snapshots.append(version.step)
        snapshot(copies, version)

    boundary.time = SimpleNamespace(monotonic=lambda: now_s)  # type: ignore[assignment]
    Boundary.agreed, Copies.snapshot = looked, copied  # type: ignore[method-assign]
    try:
        with first.keeper:
            second.keeper.restore()
            # A checkpoint is due at the end of the first loop.
            for step in itertools.chain(first.keeper.steps(64), first.keeper.steps(1000)):
                # As a loop with two micro-batches does.
                second.keeper.step_begin()
                second.keeper.step_begin()
                if step == LAST and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                # Some steps are slower on one rank.
                now_s += 0.002 + 0.001 * (step % 7 == dist.get_rank())
                first.step()
                second.step()
    except SystemExit as end:
        second.keeper.close(end)
        found = [
            {"looks": each.looks, "snapshots": each.snapshots, "step": each.keeper.step} for each in (first, second)
        ]
        steps = [mark.step for mark in marks(FOLDER / "checkpoints")]
        print(json.dumps({"parts": found, "code": end.code, "marks": steps}))


if __name__ == "__main__":
    main()
