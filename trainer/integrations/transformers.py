"""The Keeper in `transformers.Trainer`: `Trainer(…, callbacks=[ElaunchTrainerCallback()])`."""

from __future__ import annotations

import json
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback

from elaunch.trainer.data.batches import EpochOrder, require_skippable
from elaunch.trainer.integrations import with_own
from elaunch.trainer.keeper.keeper import Keeper

# What a Trainer records of a run. The other fields come from its arguments.
_RECORDED = (
    "best_global_step",
    "best_metric",
    "best_model_checkpoint",
    "epoch",
    "global_step",
    "log_history",
    "num_input_tokens_seen",
    "total_flos",
)


class ElaunchTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps model, optimizer, scheduler and the Trainer's record; `options` are the Keeper's (`checkpoints=…`).

    After a restart the Trainer skips the batches of the complete steps without loading them. The first loss that
    it logs then is the mean since the restored step.
    """

    def __init__(self, **options: Any) -> None:
        self._options, self._order = options, EpochOrder()
        self._keeper: Keeper | None = None
        self._epoch = -1
        self._restored = 0

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        """Restore the newest state."""
        require_skippable(getattr(train_dataloader, "base_dataloader", train_dataloader))
        batches, steps = _epoch_of(train_dataloader, args)
        _require_possible(args, state, lr_scheduler, batches)
        self._keeper = Keeper(
            model,
            getattr(optimizer, "optimizer", optimizer),
            scheduler=lr_scheduler,
            scaler=getattr(optimizer, "scaler", None),
            **with_own(self._options, per_rank=self._order, extra=_Record(state)),
        )
        self._epoch, self._restored = -1, self._keeper.restore()
        self._resumed_epoch, self._done = divmod(self._restored, steps)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any) -> None:
        """Skip what is done."""
        self._epoch += 1
        base = getattr(train_dataloader, "base_dataloader", train_dataloader)
        if self._epoch < self._resumed_epoch:
            self._order.skip(base)
            return
        done = self._done * args.gradient_accumulation_steps if self._epoch == self._resumed_epoch else 0
        if not done:
            self._live_keeper.redraw()
            self._live_keeper.restore_random()
        # Else the generators of the training are restored when the first step begins.
        self._order.begin(base, done)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop here if a stop is requested, and make the copies that are due."""
        self._live_keeper.step_begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the commit: optimizer, scheduler, scaler and record change."""
        self._live_keeper.commit_begin()

    def on_step_end(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any) -> None:
        """Correct the epoch, and end the commit."""
        batches, steps = _epoch_of(train_dataloader, args)
        in_epoch = state.global_step - self._epoch * steps
        # The Trainer counts from the first batch that it gets.
        state.epoch = self._epoch + min(in_epoch * args.gradient_accumulation_steps, batches) / batches
        self._live_keeper.step_end()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Undo what an evaluation drew: a restart does not repeat it."""
        self._live_keeper.redraw()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue after an epoch without a batch, which was done before."""
        if self._epoch < self._resumed_epoch:
            control.should_training_stop = state.global_step >= state.max_steps
            control.should_log = control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Correct the first loss: a sum since the restart, which the Trainer divides by all steps."""
        if self._restored and state.global_step > self._restored and ("loss" in logs or "train_loss" in logs):
            name = "loss" if "loss" in logs else "train_loss"
            logs[name] *= state.global_step / (state.global_step - self._restored)
            state.log_history[-1][name] = logs[name]
            self._restored = 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the last state, and on disk too if there are checkpoints."""
        self._live_keeper.close()

    @property
    def _live_keeper(self) -> Keeper:
        assert self._keeper is not None
        return self._keeper


class _Record:
    """The Trainer's record as JSON, which is how the Trainer itself saves it."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        recorded = {name: value for name, value in vars(self._state).items() if name in _RECORDED}
        return {"json": json.dumps(recorded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._state).update(json.loads(state["json"]))


def _epoch_of(loader: Any, args: Any) -> tuple[int, int]:
    """How many batches and how many optimizer steps an epoch has."""
    batches, each = len(loader), args.gradient_accumulation_steps
    return batches, max(1, -(-batches // each))


def _require_possible(args: Any, state: Any, scheduler: Any, batches: int) -> None:
    each = args.gradient_accumulation_steps
    if batches % each:
        raise ValueError(
            f"an epoch has {batches} batches, and gradient_accumulation_steps is {each}: the Trainer would leave out "
            f"the last {batches % each} after a restart; choose dataset and batch size so that none is left"
        )
    if state.global_step:
        raise ValueError(
            f"the Trainer begins after step {state.global_step}, because of resume_from_checkpoint; leave that out: "
            "ElaunchTrainerCallback(checkpoints=…) restores from memory and from its own checkpoints"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau changes after an evaluation, not with a step, and would not be restored exactly; use "
            "another lr_scheduler_type"
        )
