"""Commits by hooks on the optimizer, for loops whose source nobody can change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from elaunch.trainer.state.training_state import Training

if TYPE_CHECKING:
    from elaunch.trainer.keeper.guarded_state import GuardedState
    from elaunch.trainer.keeper.keeper import Keeper


class OptimizerHooks:
    """Begins a commit before `optimizer.step`, and ends it once nothing else can change the state.

    That is after `optimizer.step` of the last optimizer. A scheduler and `extra` change after it, so with one of them
    it is when the next forward pass begins, whether it trains or evaluates. A training forward pass also calls
    `keeper.step_begin`. A rank's own state is that after the last `optimizer.step`; with `redraws` its random states
    are those at the end of the commit.
    """

    def __init__(
        self, keeper: Keeper, state: GuardedState, training: Training, module: nn.Module, *, redraws: bool
    ) -> None:
        self._keeper, self._state, self._model, self._redraws = keeper, state, training.model, redraws
        self._optimizers = training.optimizers
        if training.has_scaler:
            raise ValueError(
                "commit_by_hooks cannot see the steps that a GradScaler skips: put scaler.step() and scaler.update() "
                "into `with keeper.commit():`, or train in bfloat16, which needs no scaler"
            )
        # Without them the state is complete with the optimizers' steps.
        self._has_more = training.has_scheduler_or_extra
        self._stepped: list[int] = []
        self._evaluated_step = -1
        self._handles: list[Any] = [module.register_forward_pre_hook(self._before_forward)]
        for one in self._optimizers:
            self._handles += [one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after)]

    def remove(self) -> None:
        """Take all hooks back."""
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
            self._state.begin()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped.append(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        if self._has_more:
            # The loop may fetch the next batch before the next pass.
            self._state.put_down()
        else:
            self._finish()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self._stepped:
            self._finish()
        # A wrapper may say something else: Lightning switches only the inner model.
        if not self._model.training:
            self._evaluated_step = self._keeper.step
            return
        if self._redraws and self._evaluated_step == self._keeper.step:
            # It is not made again after a restart.
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
