"""The training of the keeper's fault tests: a network with BatchNorm and dropout, killed where the test asks for it.

Run as `kept.py FOLDER STEPS [OPTION=VALUE …]`, a folder that all workers see. Options are the Keeper's:
`lose_at_most`, `checkpoints`, `checkpoint_every`; and `hook=powersgd`, `shards=fsdp2`, `shards=hsdp`, `shards=zero`,
`snapshot_every=N` (of snapshots only), `looks=1` (after each step). An empty file
FOLDER/<moment>-<generation>-<step>-<rank> makes that rank kill itself with SIGKILL there. Moments:

    start, restore (with step 0), forward, committed
    backward      the first gradients are on their way to the others
    optimizer     half of the parameters are new
    commit        all parameters are, the scheduler is not
    together      after the forward pass, at once with all others that have such a file
    copy          half of a copy of that step is in memory
    piece         half of this rank's own part of that step is in memory (a state in parts, or with a hook)
    crash         not a kill: an exception before the forward pass
    hold          not a kill: wait there until the file is gone
    settle        not a kill: wait there until the snapshots that were sent have arrived
    freeze        not a kill: stopped when half of a copy of that step is in memory
    corrupt       not a kill: before the forward pass, a byte of the newest copy in this node's memory is changed
    mirror        not a kill: the threads that exchange snapshots do not receive what other nodes send

Each rank appends JSON lines to FOLDER/records: `began`, `done` (with the bits of its own loss of the step), `requested`
(to stop), `killed`, `held`, `frozen`, `corrupted`, `deaf`, with digests of its state `end`, and `left` (with the number
of sockets that the Keeper has left open).
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moments import GENERATION, RANK, Moments, fix_steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.memory.device_copy import HostCopies
from elaunch.trainer.memory.node_memory import Records
from elaunch.trainer.memory.slots import copy_on_host
from elaunch.trainer.ranks.peers import Peers

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
OPTIONS = dict(word.split("=", 1) for word in sys.argv[3:])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
MOMENTS = Moments(FOLDER)
record, is_asked, moment = MOMENTS.record, MOMENTS.is_asked, MOMENTS.strike


def corrupt(step: int) -> None:
    """Change a byte of the newest copy of the replicated state, if the test asks for it."""
    if not is_asked("corrupt", step):
        return
    copies = Path(os.environ["ELAUNCH_MEMORY"]).glob("training.state-?")
    steps = {path: int.from_bytes(path.read_bytes()[32:40], "little") for path in copies}
    newest = max(steps, key=lambda path: steps[path])
    with newest.open("r+b") as file:
        file.seek(-5000, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 255]))
    record("corrupted", step=step, path=str(newest), copies=sorted(steps.values()))


def bits(value: float) -> str:
    return struct.pack("<d", value).hex()


def digest(*states: Any) -> str:
    """SHA-256 over all tensors and plain values of the states."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            value = getattr(value, "_local_tensor", value)
            raw = bytearray(value.numel() * value.element_size())
            if raw:
                torch.frombuffer(raw, dtype=value.dtype).copy_(value.detach().flatten())
            found.update(raw)
        elif isinstance(value, dict):
            for key in value:
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    for state in states:
        add(state)
    return found.hexdigest()[:16]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


class Interruptible(torch.optim.AdamW):
    """AdamW that may be killed when half of the parameters are new; `step_now` tells which step it is."""

    step_now: Callable[[], int]

    def step(self, closure: Any = None) -> Any:
        if is_asked("optimizer", self.step_now()):
            parameters = self.param_groups[0]["params"]
            before = [parameter.detach().clone() for parameter in parameters]
            for parameter in parameters[::2]:
                parameter.grad = None
            super().step()
            same = [torch.equal(old, new) for old, new in zip(before, parameters, strict=True)]
            assert True in same
            assert False in same
            moment("optimizer", self.step_now())
        return super().step(closure)


def main() -> None:
    torch.manual_seed(3)
    dist.init_process_group("gloo")
    network = Network()
    model, optimizer = spread(network)
    sockets = len(open_sockets())
    torch.manual_seed(100 + RANK)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    extra: dict[str, Any] = {"seen": 0}
    hook_state = power_sgd(model) if OPTIONS.get("hook") == "powersgd" else None
    keeper = Keeper(
        model,
        optimizer,
        scheduler=scheduler,
        extra=extra,
        hook_state=hook_state,
        checkpoints=OPTIONS.get("checkpoints"),
        checkpoint_every=int(OPTIONS.get("checkpoint_every", 1000)),
        lose_at_most=int(OPTIONS["lose_at_most"]) if "lose_at_most" in OPTIONS else None,
        warm_up=lambda: model(torch.ones(4, 16)).sum().backward(),
    )
    fix_steps(looks="looks" in OPTIONS, snapshots=int(OPTIONS.get("snapshot_every", 0)))
    MOMENTS.record_stops()
    plant_in_threads(keeper)
    plant_in_copies(keeper)
    # The last layer's gradients come first, so this rank dies before the others have come. FSDP2 has one bucket.
    list(model.parameters())[-1].register_post_accumulate_grad_hook(lambda _: moment("backward", keeper.step + 1))
    if isinstance(optimizer, Interruptible):
        plant(keeper, optimizer)
    moment("start", 0)

    with keeper:
        record("began", step=keeper.step, repeated=keeper.repeated, memory=os.environ.get("ELAUNCH_MEMORY"))
        # A DataLoader also draws from the global generator at every start.
        torch.empty((), dtype=torch.int64).random_()
        for step in keeper.steps(STEPS):
            loss = train(step, keeper, model, optimizer, scheduler, extra)
            record("done", step=step, loss=bits(loss))
            moment("committed", step)
        moments = getattr(optimizer, "optim", optimizer).state_dict()
        replicated = digest(list(model.parameters()), moments, scheduler.state_dict(), extra)
        own = digest(torch.get_rng_state(), hook_state.error_dict if hook_state else {})
        state = digest(model.state_dict(), replicated)
    record("end", step=keeper.step, replicated=replicated, state=state, own=own)
    record("left", sockets=len(open_sockets()) - sockets)


def open_sockets() -> list[str]:
    """The sockets of this process: those of the process group, and of the Keeper while it is entered."""
    files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    targets = []
    for path in files:
        # A thread may close it meanwhile.
        with suppress(FileNotFoundError):
            targets.append(str(path.readlink()))
    return [target for target in targets if target.startswith("socket:")]


def spread(network: Network) -> tuple[Any, Any]:
    """The model and its optimizer: DDP's, or with `shards=fsdp2` or `shards=zero` in parts."""
    match OPTIONS.get("shards"):
        case "fsdp2" | "hsdp" as kind:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            # The first half of the ranks and the second half are replicas of each other.
            mesh = (
                init_device_mesh("cpu", (2, WORLD_SIZE // 2), mesh_dim_names=("replicas", "shards"))
                if kind == "hsdp"
                else init_device_mesh("cpu", (WORLD_SIZE,))
            )
            model = fully_shard(network, mesh=mesh)
            return model, torch.optim.AdamW(model.parameters(), lr=0.01)
        case "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            model = DistributedDataParallel(network)
            return model, ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.01)
    # The buckets are small: with one bucket DDP regroups nothing, and the test proves nothing. PowerSGD has one bucket,
    # since it reduces several buckets in any order, and gloo fails then.
    model = DistributedDataParallel(network, bucket_cap_mb=25 if "hook" in OPTIONS else 0.01)
    return model, Interruptible(network.parameters(), lr=0.01)


def train(step: int, keeper: Keeper, model: nn.Module, optimizer: Any, scheduler: Any, extra: dict[str, Any]) -> float:
    source = torch.Generator().manual_seed(1000 * step + RANK)
    inputs = torch.randn(8, 16, generator=source)
    # This draws from the global generator, whose state must survive.
    inputs += 0.1 * torch.randn(8, 16)
    if is_asked("hold", step):
        record("held", step=step)
    while is_asked("hold", step):
        time.sleep(0.01)
    if is_asked("settle", step):
        keeper._copies.wait()
    if is_asked("crash", step):
        (FOLDER / f"crash-{GENERATION}-{step}-{RANK}").unlink()
        raise ValueError(f"asked for by the test, in generation {GENERATION}")
    corrupt(step)
    loss = (model(inputs).squeeze(1) - inputs.sum(1)).pow(2).mean()
    moment("forward", step)
    MOMENTS.strike_together(step)
    loss.backward()
    with keeper.commit():
        optimizer.step()
        moment("commit", step)
        scheduler.step()
        optimizer.zero_grad()
        extra["seen"] += 8 * WORLD_SIZE
    return loss.item()


def plant(keeper: Keeper, optimizer: Interruptible) -> None:
    """Install the moments that are inside of torch's or the keeper's code."""
    optimizer.step_now = lambda: keeper.step + 1

    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        if is_asked("copy", keeper.step):
            half = len(targets) // 2
            copy_on_host(targets[:half], sources[:half])
            moment("copy", keeper.step)
        if is_asked("freeze", keeper.step):
            half = len(targets) // 2
            copy_on_host(targets[:half], sources[:half])
            record("frozen", step=keeper.step)
            os.kill(os.getpid(), signal.SIGSTOP)
        copy_on_host(targets, sources)

    HostCopies.copy = staticmethod(copy)  # type: ignore[method-assign]

    load = keeper._training.load_replicated

    def load_replicated(state: Any) -> None:
        moment("restore", 0)
        load(state)

    keeper._training.load_replicated = load_replicated  # type: ignore[method-assign]


def plant_in_threads(keeper: Keeper) -> None:
    """Make the threads that exchange snapshots fail at the moment `mirror`."""
    length_from = Peers.length_from

    def deaf(self: Peers, rank: int) -> int:
        if threading.current_thread().name == "mirror" and is_asked("mirror", keeper.step):
            record("deaf", step=keeper.step)
            raise RuntimeError("asked for by the test")
        return length_from(self, rank)

    Peers.length_from = deaf  # type: ignore[method-assign]


def plant_in_copies(keeper: Keeper) -> None:
    """Install the moment `piece`: in the middle of a copy of what this rank alone has."""

    def halfway(targets: list[Tensor], sources: list[Tensor]) -> None:
        step = keeper.step + keeper.is_committing
        if is_asked("piece", step):
            half = len(targets) // 2
            copy_on_host(targets[:half], sources[:half])
            moment("piece", step)
        copy_on_host(targets, sources)

    keep = Records.keep

    def keep_half(self: Records, version: Any, state: Any, spare: Any = ()) -> Tensor:
        if "hook" in state and is_asked("piece", version.step):
            self._kept.older(spare).discard()
            moment("piece", version.step)
        return keep(self, version, state, spare)

    if "shards" in OPTIONS:
        from elaunch.trainer.memory import sharded

        sharded.copy_from_devices = halfway
    Records.keep = keep_half  # type: ignore[method-assign]


def power_sgd(model: DistributedDataParallel) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return state


if __name__ == "__main__":
    main()
    # Nothing refers to the group's models by then: who frees a group waits for its threads, and these may wait for the
    # interpreter (pytorch #190489).
    gc.collect()
    dist.destroy_process_group()
