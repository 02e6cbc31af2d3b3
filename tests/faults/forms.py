"""Trainings of many forms in one program, each with its own Keeper, one step of each in turn.

Run as `forms.py FOLDER STEPS FORM…` by each rank. Forms: see `FORMS`. A file FOLDER/<moment>-<generation>-<step>-<rank>
with moment `forward-FORM` or `step-FORM` (within `optimizer.step`) makes that rank kill itself there; see moments.py.
With moment `corrupt-FORM` it changes one bit of its first weight instead. The ranks compare their copies after each
step, or after each VERIFY_EVERY. Each rank prints one line of JSON: for each form the step at which it began, a digest
of its state, and all logged sentences.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moments import RANK, Moments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elaunch.trainer.keeper import verification
from elaunch.trainer.keeper.keeper import Keeper

FOLDER, STEPS, NAMES = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
MOMENTS = Moments(FOLDER)
LOGGED: list[str] = []


@dataclass
class Form:
    """One training: `models` are what the program calls, and `after` runs in each commit after the optimizers."""

    models: list[nn.Module]
    optimizers: list[Any]
    loss: Callable[[Tensor], Tensor]
    extra: Any = None
    after: Callable[[], object] = lambda: None

    def keeper(self, name: str) -> Keeper:
        model: Any = self.models if len(self.models) > 1 else self.models[0]
        return Keeper(
            model,
            self.optimizers,
            extra=self.extra,
            per_rank=(),
            lose_at_most=1,
            verify_every=int(os.environ.get("VERIFY_EVERY", "1")),
            # With three ranks and more DDP sums in another order before it has seen a backward pass.
            warm_up=(lambda: self.loss(torch.zeros(4, 8)).backward()) if name == "ddp" else None,
            name=name,
            log=LOGGED.append,
        )


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def square(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda inputs: (model(inputs) - inputs.flip(1)).square().mean()


def adamw(*models: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.01, **options)


def muon_and_adamw(model: nn.Module) -> list[Any]:
    parameters = [*model.parameters()]
    matrices, others = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def sharded(model: nn.Sequential, mesh: Any = None) -> nn.Sequential:
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def ddp() -> Form:
    model = DistributedDataParallel(network())
    return Form([model], [adamw(model, fused=True)], square(model))


def muon_fsdp2() -> Form:
    model = sharded(network())
    return Form([model], muon_and_adamw(model), square(model))


def ema() -> Form:
    inner = network()
    model = DistributedDataParallel(inner)
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return Form([model], [adamw(model)], square(model), average, lambda: average.update_parameters(inner))


def gan() -> Form:
    generator, critic = DistributedDataParallel(network()), DistributedDataParallel(network())
    return Form(
        [generator, critic],
        [adamw(generator), adamw(critic)],
        lambda inputs: (critic(generator(inputs)) - inputs).square().mean(),
    )


def zero() -> Form:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    return Form([model], [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)], square(model))


class Distributed(torch.optim.SGD):
    """Each parameter's update is computed by one rank, and sent to all: collectives within `step`."""

    begun = 0

    def step(self, closure: Any = None) -> Any:
        self.begun += 1
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            update = parameter.grad if number % WORLD_SIZE == RANK else torch.zeros_like(parameter)
            if number == 1:
                MOMENTS.strike("step-collective", self.begun)
            dist.all_reduce(update)
            parameter.grad = update
        return super().step(closure)


def collective() -> Form:
    model = DistributedDataParallel(network())
    return Form([model], [Distributed(model.parameters(), lr=0.01, momentum=0.9)], square(model))


def fsdp_tp() -> Form:
    mesh = init_device_mesh("cpu", (WORLD_SIZE // 2, 2), mesh_dim_names=("dp", "tp"))
    model = network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = sharded(model, mesh["dp"])
    return Form([model], [adamw(model)], square(model))


def hsdp() -> Form:
    mesh = init_device_mesh("cpu", (2, WORLD_SIZE // 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(network(), mesh)
    return Form([model], [adamw(model)], square(model))


FORMS: dict[str, Callable[[], Form]] = {
    "ddp": ddp,
    "muon_fsdp2": muon_fsdp2,
    "ema": ema,
    "gan": gan,
    "zero": zero,
    "collective": collective,
    "fsdp_tp": fsdp_tp,
    "hsdp": hsdp,
}


def steps(name: str, form: Form, keeper: Keeper) -> Iterator[None]:
    for step in keeper.steps(STEPS):
        # A slice of one batch for each rank: with tensor parallelism two ranks have the same.
        source = torch.Generator().manual_seed(step if name == "fsdp_tp" else 1000 * step + RANK)
        inputs = torch.randn(4, 8, generator=source)
        MOMENTS.strike(f"forward-{name}", step)
        if MOMENTS.is_asked(f"corrupt-{name}", step):
            # As a broken memory would: torch does not count it.
            next(form.models[0].parameters()).data.view(-1).view(torch.int32)[5] ^= 1 << 12
        form.loss(inputs).backward()
        with keeper.commit():
            for optimizer in form.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            form.after()
        yield


def digest(form: Form) -> str:
    found = hashlib.sha256()
    parts = [*form.models, *([form.extra] if isinstance(form.extra, nn.Module) else [])]
    tensors = [tensor for part in parts for tensor in part.state_dict().values()]
    for optimizer in form.optimizers:
        state = getattr(optimizer, "optim", optimizer).state
        tensors += [value for its in state.values() for value in its.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach().contiguous()
        found.update(local.flatten().view(torch.uint8).numpy().tobytes() if local.numel() else b"")
    return found.hexdigest()[:16]


def main() -> None:
    verification._FIRST_S = 0.5
    dist.init_process_group("gloo")
    forms = {name: FORMS[name]() for name in NAMES}
    with ExitStack() as stack:
        keepers = {name: stack.enter_context(form.keeper(name)) for name, form in forms.items()}
        began = {name: keeper.step for name, keeper in keepers.items()}
        runs = {name: steps(name, forms[name], keepers[name]) for name in NAMES}
        for _ in range(STEPS + 1):
            for run in runs.values():
                next(run, None)
        found = {name: {"began": began[name], "digest": digest(form)} for name, form in forms.items()}
    print(json.dumps({"forms": found, "logged": LOGGED}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
