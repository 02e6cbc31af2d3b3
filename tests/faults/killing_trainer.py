"""The bundled trainer, struck where the test asks for it: `killing_trainer.py FOLDER [OPTION …]`, its own options.

See moments.py for FOLDER. The moments of a step:

    forward       before a forward pass
    backward      the first gradients of the pass that sums them over the ranks are there, others to come
    loss          all gradients are summed, the loss is not
    optimizer     half of the parameters are new
    unwritten     the step is committed, its line is not written
    committed     the step is committed, its line is written
    copy          half of a copy of that step is in memory
    publish       the checkpoint of that step is on the disk, and does not have its name yet
    published     the checkpoint has just got its name

and with step 0:

    start         before the group is joined
    measuring     before a plan is measured
    restore       the ranks have agreed on the state to load, which is not in the model yet
    evaluating    after the last step
    result        before the result is written

Each rank records `began` (with the step that was restored, and the memory's folder), `told` (to stop) and `ended`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from moments import Moments, fix_steps
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import train
from elaunch.trainer.__main__ import main
from elaunch.trainer.checkpoint import local, storage
from elaunch.trainer.gpt.recorder import Recorder
from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.keeper.boundary import Boundary
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.memory.device_copy import HostCopies
from elaunch.trainer.parallel import auto
from elaunch.trainer.ranks import process_group
from elaunch.trainer.state.training_state import Training

MOMENTS = Moments(Path(sys.argv[1]))


def before(owner: Any, name: str, moment: str, step: Callable[..., int]) -> None:
    """Strike at `moment` before each call of `owner.name`; `step` tells from its arguments which step it is."""
    real = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        MOMENTS.strike(moment, step(*args))
        return real(*args, **kwargs)

    setattr(owner, name, struck)


class StruckKeeper(Keeper):
    """A keeper with the moments around a commit. `entered` is the keeper in use, if there is one."""

    entered: Keeper | None = None

    def __enter__(self) -> Keeper:
        super().__enter__()
        StruckKeeper.entered = self
        MOMENTS.record("began", step=self.step, memory=os.environ.get("ELAUNCH_MEMORY"))
        return self

    def steps(self, total: int) -> Iterator[int]:
        for step in super().steps(total):
            yield step
            MOMENTS.strike("committed", step)

    @contextmanager
    def commit(self) -> Iterator[None]:
        with super().commit():
            yield
        MOMENTS.strike("unwritten", self.step)


def now() -> int:
    """The step that is computed now. 0 while the keeper warms up and restores."""
    return StruckKeeper.entered.step + 1 if StruckKeeper.entered else 0


def plant() -> None:
    """Put all moments in place."""
    train.Keeper = StruckKeeper  # type: ignore[misc]
    # A request to stop is obeyed after the step in which it comes: tests name that step.
    fix_steps(looks=True)
    before(process_group, "join", "start", lambda place: 0)
    before(auto, "try_plan", "measuring", lambda *_: 0)
    before(Training, "load_replicated", "restore", lambda *_: 0)
    before(Training, "load_whole", "restore", lambda *_: 0)
    before(train, "held_out_loss", "evaluating", lambda *_: 0)
    before(RunDirectory, "write_result", "result", lambda *_: 0)
    before(Recorder, "mean_loss", "loss", lambda *_: now())
    before(local, "publish", "publish", lambda folder, mark: mark.step)
    before(local, "sync_directory", "published", lambda folder: newest_published(folder))
    build, copy, tell = train.build, HostCopies.copy, Boundary.tell

    def told(boundary: Boundary, reason: str) -> None:
        tell(boundary, reason)
        MOMENTS.record("told", reason=reason)

    def built(*args: Any) -> Any:
        parallel = build(*args)
        model: torch.nn.Module = parallel.model
        model.register_forward_pre_hook(lambda *_: strike_in_forward(model))
        plant_in_backward(model)
        plant_in_optimizer(parallel.optimizer)
        return parallel

    def half_copied(targets: list[Tensor], sources: list[Tensor]) -> None:
        step = now() - 1
        if MOMENTS.is_asked("copy", step):
            half = len(targets) // 2
            copy(targets[:half], sources[:half])
            MOMENTS.strike("copy", step)
        copy(targets, sources)

    Boundary.tell = told  # type: ignore[method-assign]
    train.build = built
    HostCopies.copy = staticmethod(half_copied)


def newest_published(folder: Path) -> int:
    """The step of the checkpoint that has just got its name, or -1 for another folder."""
    found = storage.marks(folder)
    return found[-1].step if found else -1


def strike_in_forward(model: torch.nn.Module) -> None:
    if model.training:
        MOMENTS.strike("forward", now())
        MOMENTS.strike_together(now())


def plant_in_backward(model: torch.nn.Module) -> None:
    if not isinstance(model, DistributedDataParallel):
        return

    def arrived(_: Tensor) -> None:
        if model.require_backward_grad_sync:
            MOMENTS.strike("backward", now())

    # The last layer's gradients come first.
    list(model.module.parameters())[-1].register_post_accumulate_grad_hook(arrived)


def plant_in_optimizer(optimizer: Any) -> None:
    step = optimizer.step

    def half_stepped(closure: None = None) -> None:
        if MOMENTS.is_asked("optimizer", now()):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters[::2]:
                parameter.grad = None
            step()
            MOMENTS.strike("optimizer", now())
            # The process was only held, not killed: copy the other half too.
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if parameter.grad is not None else gradient
        step()

    optimizer.step = half_stepped


if __name__ == "__main__":
    plant()
    code = main(sys.argv[2:])
    MOMENTS.record("ended", code=code)
    sys.exit(code)
