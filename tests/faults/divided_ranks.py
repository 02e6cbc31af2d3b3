"""A small network trained by one plan after the other, in the same ranks, and beside it by one process alone.

Run as `divided_ranks.py STEPS LAYERS PLAN…` by each rank; a PLAN after `compiled:` is compiled. The process alone
computes the mean loss over all windows of a step at once, with torch's own functions. Each rank prints, for each plan,
the largest relative differences of losses, norms, held-out loss and final weights.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import AdamW

from elaunch.trainer.data.order import Micro, Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.parallel.build import build
from elaunch.trainer.parallel.plan import DataShare
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.train import GRADIENT_NORM_MAX, decay_groups, held_out_loss, new_gpt

STEPS, LAYERS, PLANS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"layers": LAYERS, "heads": 4, "width": 32, "context": 16, "micro_batch": 2, "seed": 3}
BATCH = 16
HELD_OUT = 5


class Rows:
    """Windows of random bytes in place of a text."""

    def __init__(self, config: TrainConfig, share: DataShare) -> None:
        torch.manual_seed(11)
        self._rows = torch.randint(0, 256, (64 + HELD_OUT, config.context + 1))
        self._share = share
        self.order = Order(
            64, seed=1, global_batch=config.global_batch, micro_batch=config.micro_batch, even=config.plan.is_even
        )

    def of(self, step: int, micros: Sequence[Micro]) -> tuple[Tensor, Tensor]:
        positions = [position for micro in micros for position in self.order.loaded(step, micro.number)]
        return self.at([self.order.sample(position) for position in positions])

    def at(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self._rows[list(samples)]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def held_out(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        # The last batch is smaller than the others.
        batches = [[64, 65], [66, 67], [68]]
        size = self._share.world_size
        for number in range(self._share.rank, -(-len(batches) // size) * size, size):
            batch = batches[number % len(batches)]
            yield *self.at(batch), len(batch) / HELD_OUT if number < len(batches) else 0.0


def alone(config: TrainConfig) -> SimpleNamespace:
    """The training by one process."""
    rows = Rows(config, DataShare(0, 1, leads=True))
    gpt = new_gpt(config, CPU)
    optimizer = AdamW(decay_groups(gpt), lr=config.learning_rate)
    found = SimpleNamespace(losses=[], norms=[])
    for step in range(1, STEPS + 1):
        loss = gpt(*rows.at([sample for micro in rows.order.microbatches(step) for sample in micro]))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    with torch.no_grad():
        found.held_out = gpt(*rows.at(range(64, 64 + HELD_OUT))).item()
    found.weights = gpt.state_dict()
    return found


def planned(config: TrainConfig) -> SimpleNamespace:
    """The training by the plan of `config`."""
    sizes = config.sizes(RankInfo(RANK, RANK, WORLD_SIZE))
    rows: Any = Rows(config, sizes.share(RANK))
    parallel = build(config, new_gpt(config, CPU), sizes, RANK, CPU, decay_groups)
    found = SimpleNamespace(losses=[], norms=[])
    for step in range(1, STEPS + 1):
        # Between two training steps: what it leaves behind must not disturb the next one.
        found.held_out = held_out_loss(parallel, rows).item() if step == 2 else None
        loss = torch.zeros(())
        for micros in parallel.micro_batches(rows.order, step):
            loss += parallel.backward(*rows.of(step, micros), micros)
        found.norms.append(parallel.clip(GRADIENT_NORM_MAX).item())
        for group in parallel.optimizer.param_groups:
            group["lr"] = config.learning_rate
        parallel.optimizer.step()
        parallel.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss)
        found.losses.append(loss.item() / WORLD_SIZE)
    found.held_out = held_out_loss(parallel, rows).item()
    found.weights = dict(parallel.weights())
    return found


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected = alone(TrainConfig(global_batch=BATCH, learning_rate=1e-3, **SHAPE))
    said = {}
    for plan in PLANS:
        compiled, _, text = plan.rpartition(":")
        # A plan with the same blocks would take what an earlier one has compiled.
        torch.compiler.reset()
        options = {"parallel": text, "compile": bool(compiled), "learning_rate": 1e-3, "global_batch": BATCH}
        config = TrainConfig(**options, **SHAPE)
        found = planned(config)
        assert list(found.weights) == list(expected.weights)
        # Each rank has compiled something, and only where it was asked to.
        graphs = counters["stats"].pop("unique_graphs", 0)
        assert (graphs > 0) == config.compile, (plan, graphs)
        weights = [
            ((value - expected.weights[name]).norm() / expected.weights[name].norm().clamp(min=1e-3)).item()
            for name, value in found.weights.items()
        ]
        said[plan] = {
            "losses": apart(found.losses, expected.losses),
            "norms": apart(found.norms, expected.norms),
            "held_out": apart([found.held_out], [expected.held_out]),
            "weights": max(weights),
        }
    print(json.dumps(said), flush=True)
    dist.barrier()
    # The groups' threads may wait for the interpreter (pytorch #190489).
    os._exit(0)


main()
