"""Finds a gradient that lives across a commit: the next backward pass adds to it, and no copy of a state has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from elaunch.trainer.state.tree import is_shard

# A hook for each parameter costs time. After these commits a few are enough to see that accumulation begins later.
_COMMITS = 8
_WATCHED = 2


class LeftGradients:
    """Looks at the gradients of all parameters of `optimizers` at the first commits, later at those of a few.

    One that a commit leaves may be zeroed before it is used again, as at the beginning of the next step. So it counts
    when the next one is about to be added to it. FSDP1's gradients are not seen.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], called: Sequence[nn.Module] = ()) -> None:
        self._model = model
        # FSDP2's parameters, by the module that the program calls.
        self._sharded = {id(one): {id(p) for p in one.parameters() if is_shard(p)} for one in called}
        groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
        self._parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        self._handles = [p.register_hook(partial(self._before_sum, p)) for p in self._parameters]
        self._left: dict[int, tuple[Any, int]] = {}
        # Read at the next commit, when a GPU has computed it.
        self._found: list[tuple[Tensor, Tensor]] = []
        self._commits = 0

    def commit_begins(self, step: int) -> str:
        """A sentence about the gradients that the commit before `step` has left; "" if there are none."""
        self._left = {}
        names = [self._name_of(parameter) for parameter, is_used in self._found if is_used]
        self._found = []
        if not names:
            return ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"the gradients of `{names[0]}`{more} were still there after the commit of step {step - 1}, and the "
            f"backward pass of step {step} has added to them: a gradient that lives across a commit is not kept, and a "
            "failure would lose it. Let one step of the Keeper be all backward passes up to optimizer.step(), with one "
            "commit after them, and call optimizer.zero_grad() in the commit or before the next backward pass"
        )

    def commit_ended(self) -> None:
        """Remember the gradients that are left."""
        self._commits += 1
        if self._commits == _COMMITS:
            apart = max(1, len(self._parameters) // _WATCHED)
            for number, handle in enumerate(self._handles):
                if number % apart:
                    handle.remove()
            self._parameters, self._handles = self._parameters[::apart], self._handles[::apart]
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                self._left[id(parameter)] = ref(gradient), _part(gradient)._version

    def backward_begins(self, called: nn.Module) -> None:
        """FSDP2 calls no hooks of its parameters, and adds to their gradients later in the backward pass."""
        own = self._sharded[id(called)]
        # After a forward pass that made no graph it is no backward pass that begins.
        begins = own and self._left and torch._C._current_graph_task_id() != -1
        for parameter in self._parameters if begins else ():
            if id(parameter) in own:
                self._before_sum(parameter, parameter)

    def remove(self) -> None:
        """Take all hooks back."""
        self._left = {}
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_sum(self, parameter: Tensor, _: Tensor) -> None:
        gradient, version = self._left.pop(id(parameter), (_nothing, 0))
        now = parameter.grad
        if now is not None and gradient() is now and (part := _part(now))._version == version:
            # Zeros may be left on purpose: zero_grad(set_to_none=False) in the commit.
            self._found.append((parameter, (part._values() if part.is_sparse else part).any()))

    def _name_of(self, parameter: Tensor) -> str:
        named: Iterable[tuple[str, Tensor]] = self._model.named_parameters()
        return next((name for name, one in named if one is parameter), "a parameter")


def _part(gradient: Tensor) -> Tensor:
    """What FSDP2 adds to: this rank's part, which counts its own changes."""
    part: Tensor = getattr(gradient, "_local_tensor", gradient)
    return part


def _nothing() -> None:
    return None
