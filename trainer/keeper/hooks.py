"""Hooks on passes and optimizers: they store a rank's own state, find gradients that a commit leaves, and commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from elaunch.trainer.state.model_state import hook_after_forward, unwrap
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import is_shard, some, tensors_in


def hook_backward(
    model: nn.Module, store: Callable[[], object], at_end: Callable[[], object] = tuple
) -> Callable[[], None]:
    """Run `store` in each training backward pass, before any other rank can complete the step without this one.

    That is when the pass reaches what the forward pass of `model` returned: the loss is computed, and no gradient of
    `model` has been reduced. If the outputs have no graph, `store` runs after the forward pass. If parts of `model` are
    called directly, it runs once the gradient of the first parameter, the last to be reduced, is computed.
    Else `at_end` runs then: gradient checkpointing has run all forward passes again, which may change buffers.
    Returns a function that removes the hooks.
    """
    is_stored, inner = False, unwrap(model)

    def reached(_: Tensor) -> None:
        nonlocal is_stored
        is_stored = True
        store()

    def after_forward(module: nn.Module, inputs: object, outputs: object) -> None:
        if not inner.training:
            return
        if found := [tensor for _, tensor in tensors_in(outputs) if tensor.grad_fn is not None]:
            if len(found) == 1:
                # A hook on several tensors takes several times as long.
                found[0].register_hook(reached)  # type: ignore[no-untyped-call]
            else:
                register_multi_grad_hook(found, reached, mode="any")
        else:
            store()

    def at_first_parameter(_: Tensor) -> None:
        nonlocal is_stored
        (at_end if is_stored else store)()
        is_stored = False

    handles: list[Any] = [hook_after_forward(model, after_forward)]
    first = next((one for one in model.parameters() if one.requires_grad), None)
    if first is not None:
        handles.append(first.register_hook(at_first_parameter))  # type: ignore[no-untyped-call]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


# A hook for each parameter costs time. After these commits a few are enough to detect accumulation that begins later.
_COMMITS = 8
_WATCHED = 2


class LeftGradients:
    """Checks the gradients of all parameters of `optimizers` at the first commits, later those of a few.

    A gradient that a commit leaves may be zeroed before it is used again, as at the beginning of the next step. So it
    counts when the next one is about to be added to it. FSDP1's gradients are not checked.
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
        names = [f"`{self._name_of(parameter)}`" for parameter, is_used in self._found if is_used]
        self._found = []
        if not names:
            return ""
        return (
            f"the gradients of {some(names, 1)} were still there after the commit of step {step - 1}, and the "
            f"backward pass of step {step} has added to them: a gradient that lives across a commit is not kept, and a "
            "failure would lose it. Let one step of the Keeper be all backward passes up to optimizer.step(), with one "
            "commit after them, and call optimizer.zero_grad() in the commit or before the next backward pass"
        )

    def commit_ended(self) -> None:
        """Record the gradients that are left."""
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
        # Also called after a forward pass that made no graph, where no backward pass begins.
        begins = own and self._left and torch._C._current_graph_task_id() != -1
        for parameter in self._parameters if begins else ():
            if id(parameter) in own:
                self._before_sum(parameter, parameter)

    def remove(self) -> None:
        """Remove all hooks."""
        self._left = {}
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_sum(self, parameter: Tensor, _: Tensor) -> None:
        gradient, version = self._left.pop(id(parameter), (lambda: None, 0))
        now = parameter.grad
        if now is not None and gradient() is now and (part := _part(now))._version == version:
            # Zeros may be left on purpose: zero_grad(set_to_none=False) in the commit.
            self._found.append((parameter, (part._values() if part.is_sparse else part).any()))

    def _name_of(self, parameter: Tensor) -> str:
        named: Iterable[tuple[str, Tensor]] = self._model.named_parameters()
        return next((name for name, one in named if one is parameter), "a parameter")


def _part(gradient: Tensor) -> Tensor:
    """This rank's part, to which FSDP2 adds, and which has its own version counter."""
    part: Tensor = getattr(gradient, "_local_tensor", gradient)
    return part


class Steps(Protocol):
    """The methods of a Keeper that the hooks call; its module imports this one."""

    @property
    def step(self) -> int: ...
    def step_begin(self) -> None: ...
    def commit_begin(self) -> None: ...
    def step_end(self) -> bool: ...
    def redraw_once(self) -> None: ...
    def keep_draws(self) -> None: ...


class OptimizerHooks:
    """Begins a commit before `optimizer.step`, and ends it once nothing else can change the state.

    That is after `optimizer.step` of the last optimizer. A scheduler and `extra` change after it, so with one of them
    it is when the next forward pass begins, whether it trains or evaluates. A training forward pass also calls
    `keeper.step_begin`. A rank's own state is that after the last `optimizer.step`, which `store` takes; with `redraws`
    its random states are those at the end of the commit.
    """

    def __init__(
        self, keeper: Steps, store: Callable[[], object], training: Training, module: nn.Module, *, redraws: bool
    ) -> None:
        self._keeper, self._store, self._model, self._redraws = keeper, store, training.model, redraws
        self._optimizers = training.optimizers
        if training.has_scaler:
            raise ValueError(
                "commit_by_hooks cannot see the steps that a GradScaler skips: put scaler.step() and scaler.update() "
                "into `with keeper.commit():`, or train in bfloat16, which needs no scaler"
            )
        # Without a scheduler and `extra` the state is complete after the optimizers' steps.
        self._has_more = training.has_scheduler_or_extra
        self._stepped: list[int] = []
        self._evaluated_step = -1
        self._handles: list[Any] = [module.register_forward_pre_hook(self._before_forward)]
        for one in self._optimizers:
            self._handles += [one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after)]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step was called with a closure, which computes gradients within the "
                "commit; compute them first, or call keeper.commit_begin() when the gradients are complete"
            )
        if id(optimizer) in self._stepped:
            # A second step with the same gradients, or with gradients of another model.
            self._finish()
        if not self._stepped:
            self._keeper.commit_begin()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped.append(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        if self._has_more:
            # The loop may fetch the next batch before the next pass.
            self._store()
        else:
            self._finish()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self._stepped:
            self._finish()
        # A wrapper may have another mode: Lightning switches only the inner model.
        if not self._model.training:
            self._evaluated_step = self._keeper.step
            return
        if self._redraws and self._evaluated_step == self._keeper.step:
            # The evaluation is not repeated after a restart.
            self._keeper.redraw_once()
        self._keeper.step_begin()

    def _finish(self) -> None:
        if len(self._stepped) < len(self._optimizers):
            missing = [str(n) for n, one in enumerate(self._optimizers) if id(one) not in self._stepped]
            raise RuntimeError(
                f"of {len(self._optimizers)} optimizers number {', '.join(missing)} did not step before the next pass: "
                "commit_by_hooks needs one step() of each, one after the other; optimizers that step in turn need "
                "`with keeper.commit():` around all that changes in one step"
            )
        self._stepped = []
        if self._keeper.step_end() and self._redraws and self._model.training:
            self._keeper.keep_draws()
