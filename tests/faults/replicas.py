"""The training for tests of nodes that HSDP loses: two replicas, of two shards each if there are four ranks.

Run as `replicas.py FOLDER STEPS STRUCK [held] [deaf]` by each rank. In generation 0 each rank kills itself in step
STRUCK, once all ranks have come there, or with `held` waits there for the end. With `deaf` no rank receives what
another node sends.

Each rank prints lines of JSON: `step`, a digest of its own part of the state and of the `whole`, for the restored step
and for each one that it completes; `held`; at last `said`, `began` and `repeated`. Nothing in the state is drawn, so
all runs are alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.ranks.peers import Peers

FOLDER, STEPS, STRUCK, *WORDS = sys.argv[1:]
RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["ELAUNCH_GENERATION"])


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, part: Callable[[Any], torch.Tensor]) -> str:
    found = hashlib.sha256()
    moments = [value for its in optimizer.state.values() for value in its.values()]
    for tensor in (*model.parameters(), *moments):
        local = part(tensor).detach().contiguous()
        found.update(local.flatten().view(torch.uint8).numpy().tobytes() if local.numel() else b"")
    return found.hexdigest()[:16]


def own(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def be_deaf() -> None:
    """The threads that exchange snapshots do not receive."""
    length_from = Peers.length_from

    def deaf(self: Peers, rank: int) -> int:
        if threading.current_thread().name == "mirror":
            raise RuntimeError("asked for by the test")
        return length_from(self, rank)

    Peers.length_from = deaf  # type: ignore[method-assign]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8))
    fully_shard(
        model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    said: list[str] = []
    if "deaf" in WORDS:
        be_deaf()

    def note(step: int) -> None:
        digests = {"digest": digest(model, optimizer, own), "whole": digest(model, optimizer, whole)}
        print(json.dumps({"step": step, **digests}), flush=True)

    Copies.snapshot_every = property(lambda _: 5)  # type: ignore[method-assign, assignment]
    every = {"lose_at_most": 1, "checkpoint_every": 8}
    with Keeper(model, optimizer, per_rank=(), checkpoints=f"{FOLDER}/checkpoints", say=said.append, **every) as keeper:
        began = keeper.step
        note(began)
        for step in keeper.steps(int(STEPS)):
            if GENERATION == 0 and step == int(STRUCK):
                # What was sent has arrived, and what was written is durable.
                keeper._copies.wait()
                dist.barrier()
                if "held" in WORDS:
                    print(json.dumps({"held": step}), flush=True)
                    signal.pause()
                os.kill(os.getpid(), signal.SIGKILL)
            source = torch.Generator().manual_seed(100 * step + RANK)
            inputs = torch.randn(4, 8, generator=source)
            (model(inputs) - inputs.flip(1)).square().mean().backward()
            with keeper.commit():
                optimizer.step()
                optimizer.zero_grad()
            note(step)
    print(json.dumps({"said": said, "began": began, "repeated": keeper.repeated}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
