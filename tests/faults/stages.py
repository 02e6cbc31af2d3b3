"""A training whose ranks have different parameters, as the stages of a pipeline have: names that other ranks lack.

Run as `stages.py FOLDER STEPS` by each rank. Even ranks have one layer, odd ranks another. What changes a layer depends
on the step alone, so each rank also computes alone what it must have. A file FOLDER/die-<generation>-<step>-<rank>
makes that rank kill itself before the commit of the step. Each rank prints the step that it began after, and at the end
whether weights and moments are, to the bit, what they must be.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import tensors_in

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["ELAUNCH_GENERATION"])
STAGE = RANK % 2
OTHER_RATES = bool(os.environ.get("OTHER_RATES"))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(STAGE)
    # Layers of unlike shapes: one in the other's place would be seen.
    model = nn.ModuleDict({f"layer{STAGE}": nn.Linear(4, 3 + STAGE)})
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + STAGE * OTHER_RATES))


def compute(model: Any, step: int) -> None:
    model[f"layer{STAGE}"](torch.full((2, 4), 0.1 * step)).square().mean().backward()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [*model.state_dict().values(), *tensors_in(optimizer.state_dict())]


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    options: dict[str, Any] = {"checkpoint_every": 6, "lose_at_most": 0, "per_rank": ()}
    with Keeper(model, optimizer, checkpoints=FOLDER / "checkpoints", **options) as keeper:
        print(json.dumps({"began": keeper.step}), flush=True)
        for step in keeper.steps(STEPS):
            compute(model, step)
            # The group fails together.
            dist.all_reduce(torch.zeros(1))
            if (FOLDER / f"die-{GENERATION}-{step}-{RANK}").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            with keeper.commit():
                optimizer.step()
                optimizer.zero_grad()
    expected, its = build()
    for step in range(1, STEPS + 1):
        compute(expected, step)
        its.step()
        its.zero_grad()
    same = all(map(torch.equal, contents(model, optimizer), contents(expected, its)))
    print(json.dumps({"same": same}), flush=True)


main()
# Nothing refers to the group's models by then: who frees a group waits for its threads, and these may wait for the
# interpreter (pytorch #190489).
gc.collect()
dist.destroy_process_group()
