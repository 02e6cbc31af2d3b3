"""The training for tests of checkpoints: a small network on random numbers (DDP, FSDP, ZeRO).

Run as `shards.py KIND ACTION…` by each rank. KIND is ddp, fsdp2 or zero. Checkpoints are in FOLDER. The actions are
done in turn:

    train N         N steps; the gradients depend only on the step, so every world size computes the same
    save            keep the state, and wait until it is kept
    load            put the newest state into model and optimizer
    weights         put the newest state's model into the model, and leave out the optimizer's state
    die MOMENT RANK that rank will kill itself at MOMENT (see `at`) of a later action
    in NAME         from here on checkpoints are in the folder NAME below the first one
    note            print the messages since the last note, the present step, and a digest of the whole state

At the end each rank prints all `notes` again and a last note. For DDP and FSDP2 it adds a digest of the model alone
(`weights`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from elaunch.trainer.checkpoint import storage, writing
from elaunch.trainer.checkpoint.checkpoints import Checkpoints
from elaunch.trainer.checkpoint.filesystem import LocalFiles, ObjectFiles
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import model_state
from elaunch.trainer.state.tree import tensors_sha256

KIND, *ACTIONS = sys.argv[1:]
FOLDER = Path(os.environ["FOLDER"])
GENERATION = int(os.environ.get("ELAUNCH_GENERATION", "0"))
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def build() -> tuple[nn.Module, Any]:
    torch.manual_seed(17)
    # Shapes that no world size divides.
    model: nn.Module = nn.Sequential(nn.Linear(10, 21), nn.BatchNorm1d(21), nn.ReLU(), nn.Linear(21, 5))
    if KIND == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    if KIND == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    torch.manual_seed(number)
    inputs = torch.randn(8, 10)
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def digest(model: nn.Module, optimizer: Any) -> str:
    """A digest of the whole state, or of the model alone. It does not depend on how the state is sharded."""
    if optimizer and (optimizer.state or KIND == "zero"):
        held = model_state.state_of(model, optimizer)
    else:
        held = {"model": model_state.unwrap(model).state_dict()}
    pieces: dict[str, torch.Tensor] = {}
    for name, value in held["model"].items():
        pieces[name] = whole(value)
    moments = held["optimizer"]["state"] if "optimizer" in held else {}
    if KIND == "zero" and optimizer:
        merged: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(merged, dict(moments))
        moments = {name: each for part in merged for name, each in part.items()}
    names = [name for name, _ in model_state.unwrap(model).named_parameters()]
    for key, values in moments.items():
        for name, value in values.items():
            pieces[f"{names[key] if isinstance(key, int) else key}.{name}"] = whole(value)
    return tensors_sha256(pieces[name] for name in sorted(pieces))


def whole(value: torch.Tensor) -> torch.Tensor:
    full = getattr(value, "full_tensor", None)
    return full() if full else value


def at(moment: str, rank: int) -> None:
    """Be killed by SIGKILL there: `write` (in the middle of the first file), `part` (written, before it is reported),
    `publish` (before the manifest)."""
    if rank != RANK:
        return

    gather = Peers.gather

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def halfway(self: Any, content: Any) -> int:
        self._file.write(bytes(content)[: len(content) // 2])
        self._file.flush()
        die()
        return 0

    def unmarked(self: Any, name: str, content: bytes) -> None:
        if name == storage.MANIFEST:
            die()
        self.written(name, content)

    def reported(self: Peers, value: Any) -> Any:
        if threading.current_thread().name == "checkpoint":
            die()
        return gather(self, value)

    match moment:
        case "write":
            writing._Summing.write = halfway  # type: ignore[method-assign]
        case "part":
            Peers.gather = reported  # type: ignore[method-assign]
        case "publish":
            for files in (LocalFiles, ObjectFiles):
                files.written, files.write = files.write, unmarked  # type: ignore[attr-defined]


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    logged: list[str] = []
    done = {"step": 0}
    notes: list[dict[str, Any]] = []
    loaded: Any = None

    def noted() -> dict[str, Any]:
        new = logged[sum(len(note["logged"]) for note in notes) :]
        return {"logged": new, "loaded": loaded, **done, "digest": digest(model, optimizer)}

    place = os.environ.get("CHECKPOINTS", str(FOLDER / "checkpoints"))
    store = Checkpoints(place, generation=GENERATION, log=logged.append, keep=2)
    actions = iter(ACTIONS)
    for action in actions:
        match action:
            case "train":
                for _ in range(int(next(actions))):
                    done["step"] += 1
                    step(model, optimizer, done["step"])
            case "save":
                store.save(done["step"], {**done, **model_state.state_of(model, optimizer)})
            case "load":
                found = model_state.restore(store.load_newest, model, optimizer, done)
                loaded = [found.generation, found.step] if found else None
            case "weights":
                state = {"model": model_state.unwrap(model).state_dict()}
                found = store.load_newest(state)
                loaded = [found.generation, found.step]
                model_state.unwrap(model).load_state_dict(state["model"])
            case "die":
                at(next(actions), int(next(actions)))
            case "in":
                store.wait()
                store = Checkpoints(f"{place}/{next(actions)}", generation=GENERATION, log=logged.append, keep=2)
            case "note":
                notes.append(noted())
                print(json.dumps(notes[-1]), flush=True)
    store.wait()
    answer = {**noted(), "notes": notes}
    if KIND in ("ddp", "fsdp2"):
        answer["weights"] = digest(model, None)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(answer), flush=True)
    # Leave without destructors: the group's destructor waits for gloo's thread, which can wait for the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
