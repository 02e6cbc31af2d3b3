"""The training for tests of kills inside the Keeper's own work: looks, comparisons, copies, exchanges, restores.

Run as `paths.py FOLDER STEPS KIND [OPTION=VALUE …]` by each rank. KIND is `ddp` or `fsdp2`, the options are the
Keeper's. See moments.py for FOLDER. Moments:

    forward       before the forward pass
    look          a leaf of the tree has logged what it wants at a look after that step, and waits for what is agreed
    agreed        the root has not received every rank's state
    digests       this rank has its digests for a comparison, and has sent nothing
    forget        the ranks differ, and this one has not forgotten the steps that are given up
    copied        this rank has copied its part of that step, and has sent nothing
    sending       the thread that sends snapshots has begun to
    received      a snapshot of another node is there, and does not count yet

and with step 0, at a start:

    response      another rank's proof has come, and this one's has not been sent
    inventory     all ranks have logged what they have
    part          this rank is about to load its part

An empty file FOLDER/corrupt-<generation>-<step>-<rank> changes a bit of that rank's weights before that step.

Each rank prints lines of JSON: `step` and a digest of the whole state, for each step that it completes; at last
`began`, `repeated` and `logged`. Nothing in the state is drawn, so all runs are alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moments import RANK, Moments, fix_steps
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.keeper import copies, verification
from elaunch.trainer.keeper.boundary import Boundary
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.memory import mirror, sharded, slots
from elaunch.trainer.ranks.handshake import Contact
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.training_state import Training

FOLDER, STEPS, KIND = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
OPTIONS = {name: int(value) for name, value in (word.split("=") for word in sys.argv[4:])}
MOMENTS = Moments(FOLDER)
fix_steps(looks=True, snapshots=OPTIONS.pop("snapshot_every", 0))
# A chunk of what goes along a chain is 1 MiB at most, and the state is more than that.
WIDTH = 360
IN_THREAD = "mirror"
keeper: Keeper


def now() -> int:
    """The last complete step; 0 while the Keeper is entered."""
    return keeper.step if keeper._is_entered else 0


def plant_at_starts() -> None:
    MOMENTS.before(Contact, "confirmation", "response", now)
    MOMENTS.before(copies, "decide", "inventory", now)
    MOMENTS.before(copies, "decide_in_parts", "inventory", now)
    MOMENTS.before(Training, "load_whole", "part", now)


def plant_in_looks() -> None:
    agreed, message = Boundary.agreed, Peers._message
    is_looking = False

    def look(self: Boundary, wants: Any) -> Any:
        nonlocal is_looking
        is_looking = True
        try:
            return agreed(self, wants)
        finally:
            is_looking = False

    def in_a_look(self: Peers, *args: Any) -> bytearray:
        if is_looking:
            MOMENTS.strike("look" if RANK else "agreed", now())
        return message(self, *args)

    Boundary.agreed, Peers._message = look, in_a_look  # type: ignore[method-assign]


def plant_in_copies() -> None:
    MOMENTS.before(verification, "digests", "digests", now)
    MOMENTS.before(copies, "drop_newer", "forget", now)
    write = sharded.ShardedMemory._write_copy

    def copied(self: Any, version: Any, packed: Any) -> bool:
        done = write(self, version, packed)
        MOMENTS.strike("copied", version.step)
        return done

    sharded.ShardedMemory._write_copy = copied  # type: ignore[method-assign]
    run, received = mirror.Mirror._run, slots.received

    def exchanged(self: Any, exchange: Any, finish: Any, version: Any, spare: Any) -> None:
        begin_send = self._channel and self._channel.begin_send

        def begun(image: Tensor, target: int) -> None:
            begin_send(image, target)
            MOMENTS.strike("sending", version.step)

        if begin_send:
            self._channel.begin_send = begun
        run(self, exchange, finish, version, spare)

    def arrived(region: Tensor, expected: Any, sender: int) -> Any:
        if threading.current_thread().name == IN_THREAD:
            MOMENTS.strike("received", getattr(expected, "version", expected).step)
        return received(region, expected, sender)

    mirror.Mirror._run = exchanged  # type: ignore[method-assign]
    slots.received = arrived


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    moments = [value for its in optimizer.state.values() for value in its.values()]
    for tensor in (*model.parameters(), *moments):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in keeper.steps(STEPS):
        if MOMENTS.is_asked("corrupt", step):
            # As a broken memory would: torch does not count it.
            next(model.parameters()).data.view(-1).view(torch.int32)[5] ^= 1 << 12
        MOMENTS.strike("forward", step)
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + RANK))
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps({"step": step, "digest": digest(model, optimizer)}), flush=True)


def main() -> None:
    global keeper
    verification._FIRST_S = 0.2
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    network: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    if KIND == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model: Any = fully_shard(network)
    else:
        model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    logged: list[str] = []
    warm_up = lambda: model(torch.zeros(4, WIDTH)).sum().backward()  # noqa: E731
    keeper = Keeper(model, optimizer, per_rank=(), warm_up=warm_up, log=logged.append, **OPTIONS)
    plant_at_starts()
    plant_in_looks()
    plant_in_copies()
    with keeper:
        began = keeper.step
        train(model, optimizer)
    print(json.dumps({"began": began, "repeated": keeper.repeated, "logged": logged}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
