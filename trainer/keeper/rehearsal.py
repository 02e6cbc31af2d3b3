"""`elaunch rehearse` in a worker: records the state of each step, kills at a chosen moment, stops at the last step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elaunch.trainer.keeper.unkept import digest, named, variables
from elaunch.trainer.ranks import RankInfo
from elaunch.trainer.state.model_state import hook_after_forward
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State, local_parts, several, tensors_in, tensors_sha256

# Set by the command. JSON: the `folder` of the records, the number of `steps`, and when to kill which process.
VARIABLE = "ELAUNCH_REHEARSAL"
_NAMES_MAX = 5000


class Rehearsal:
    """The records of one rank and one Keeper; `kept` are the objects that it keeps."""

    def __init__(self, environ: Mapping[str, str], place: RankInfo, name: str, kept: Mapping[str, Any]) -> None:
        self._plan, self._kept = json.loads(environ[VARIABLE]), [*kept.values()]
        self._rank, self._name, self._folder = place.rank, name, Path(self._plan["folder"])
        self._dies = not place.generation and place.rank in self._plan["ranks"]
        self._step, self._losses = 0, list[str]()
        self._seen: dict[str, Any] = defaultdict(hashlib.sha256)

    def checkpoints(self, given: Any, every: int) -> tuple[Any, int]:
        """Where checkpoints go instead, and how often: so that a new agent finds one."""
        return given and self._folder / f"checkpoints-{self._name}", min(every, max(1, self._plan["steps"] // 4))

    def attach(self, training: Training, completed: Callable[[], int], stack: ExitStack) -> None:
        """The state is restored: watch the passes until `stack` is left. `completed` is the last complete step."""
        self._training, self._completed = training, completed
        for model in training.models:
            # A program may evaluate the wrapped module.
            inner = getattr(model, "module", model)
            stack.callback(inner.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
            stack.callback(hook_after_forward(inner, self._after_forward).remove)
        original: Any = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            for _, each in tensors_in([tensors]):
                self._losses.append(repr(each.tolist()) if each.numel() == 1 else digest(each))
            original(tensors, *args, **kwargs)
            self._die("backward")

        stack.callback(setattr, torch.autograd, "backward", original)
        torch.autograd.backward = backward

    def begin(self, step: int) -> bool:
        """Record the state with which `step` begins, and what the program has done since the step before.

        Returns whether the program ends here.
        """
        self._step, training = step, self._training
        own = training.own(large=True)
        # DDP overwrites the buffers of all ranks but 0.
        is_overwritten = training.shares_buffers and self._rank
        buffers: State = {"transient": {}, "buffers": {}} if is_overwritten else training.buffers()
        rest = {**training.small(), "random": own["random"], "hook": own.get("hook")}
        # An evaluation that was cut off leaves other modes, until the step sets them.
        rest.get("settings", {}).pop("evaluating", None)
        facts: dict[str, Any] = {"the loss": " + ".join(self._losses)} if self._losses else {}
        facts |= {name: f"done {its.hexdigest()[:16]}" for name, its in self._seen.items()}
        facts |= {**dict(training.live_tensors.named()), **buffers["transient"], **buffers["buffers"]}
        facts |= dict(named("", rest))
        values = {name: digest(its) for name, its in facts.items() if its is not None} | self._beside(own)
        with (self._folder / f"{self._name}.{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "pid": os.getpid(), "facts": values}) + "\n")
        self._losses = []
        self._seen.clear()
        return step > int(self._plan["steps"])

    def _beside(self, own: Mapping[str, Any]) -> dict[str, str]:
        """Digests of `per_rank` and of the program's variables, which may explain a difference."""
        kept = frozenset(id(each) for one in self._kept for each in (one, *several(one)))
        kept |= {id(module) for one in self._training.models for module in one.modules()}
        frames = variables(sys._getframe(1))
        found = chain(named("per_rank", own.get("per_rank")), *(named(name, its, kept) for name, its in frames))
        digested: dict[str, str] = {}
        # Attributes of the program's objects may raise anything.
        with suppress(Exception):
            for name, its in islice(found, _NAMES_MAX):
                digested[f"~{name}"] = digest(its)
        return digested

    def committing(self) -> None:
        """All changes of the step are made, and the commit has not ended."""
        self._die("commit")

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        self._note(module, [args, kwargs])

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if not module.training:
            self._note(module, outputs)
            self._die("evaluation")

    def _note(self, module: nn.Module, values: object) -> None:
        name = "the evaluation after it" if self._completed() >= self._step else "the evaluation"
        parts = [part for _, each in tensors_in(values) for part in local_parts(each)]
        self._seen["the samples" if module.training else name].update(tensors_sha256(parts).encode())

    def _die(self, at: str) -> None:
        if self._dies and at == self._plan["at"] and self._step >= self._plan["step"]:
            agent = int((self._folder / "agent.pid").read_text())
            os.kill(agent if self._plan["agent"] else os.getpid(), signal.SIGKILL)
