"""The Keeper in Lightning's Trainer: `Trainer(…, callbacks=[ElaunchCallback()])`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.data.batches import first_iterator, require_skippable, set_epoch, skip_once
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import cloned

# The package has two names. The program's own `import` decides.
if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning.callbacks import Callback

# Lightning's callbacks that change the training outside of a step, and why that cannot be restored.
_REFUSED = {
    "StochasticWeightAveraging": "keeps averaged weights and a scheduler of its own, which no restart restores",
    "BaseFinetuning": "adds parameter groups within the run, which a restarted optimizer does not have",
    "BatchSizeFinder": "trains for a trial before each start; find the size once, and give it to the loader",
    "LearningRateFinder": "trains for a trial before each start; find the rate once, and give it to the optimizer",
}


class ElaunchCallback(Callback):  # type: ignore[misc]
    """Keeps model, optimizer, schedulers, loops and callbacks; `options` are the Keeper's (`checkpoints=…`).

    After a restart the loops go on as from Lightning's own checkpoint, and the batches of the complete steps are passed
    over without loading them.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"per_rank": (), **options}
        self._keeper: Keeper | None = None
        self._state: dict[str, Any] = {}
        # The batches of a step, after a restart within an epoch; 0 once they are set.
        self._accumulates = 0
        # Whether callbacks may have changed since the last step.
        self._has_evaluated = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what no restart can restore, before others have begun."""
        if stage == "fit":
            _require_others_possible(_others(trainer, self))
            if trainer.is_global_zero and os.environ.get("ELAUNCH_GENERATION", "0") == "0":
                _warn_of_hooks([pl_module, trainer.datamodule, *_others(trainer, self)])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest state."""
        _require_possible(trainer)
        if not pl_module.automatic_optimization and isinstance(trainer.strategy.model, DistributedDataParallel):
            _share_no_buffers(trainer.strategy.model)
        self._state.update(_state_of(trainer, self))
        self._keeper = Keeper(
            trainer.strategy.model,
            trainer.optimizers[0],
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            extra=_CallbackRecord(self._state),
            **self._options,
        )
        self._is_resumed = self._keeper.restore() > 0
        if self._is_resumed:
            _load_loops(trainer.fit_loop, self._state["loops"])
            self._accumulates = self._state["accumulates"]
            for callback in _others(trainer, self):
                if callback.state_key in self._state["callbacks"]:
                    callback.load_state_dict(cloned(self._state["callbacks"][callback.state_key]))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Pass over the batches that are done. The loop has made its iterators already, and makes new ones."""
        loop = trainer.fit_loop
        for loader in loop._combined_loader.flattened:
            require_skippable(loader)
        if not self._is_resumed:
            return
        done = loop.epoch_loop.batch_progress.current.ready
        for loader in loop._combined_loader.flattened:
            # With workers, the order is drawn before Lightning sets the epoch.
            epoch = loop.epoch_progress.current.processed
            set_epoch(loader, epoch)
            if epoch:
                first_iterator(loader)
            skip_once(loader, done)
        if not done:
            # The epoch's order and the seeds of the loader's workers are drawn now.
            self._kept.restore_random()
        iter(loop._data_fetcher)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """What was drawn at the end of an epoch does not count: it is not drawn again after a restart."""
        self._accumulates = 0
        self._kept.redraw()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Stop here if a stop is requested, and make the copies that are due."""
        if self._accumulates:
            # A callback may have set it when the epoch began, which Lightning does not repeat.
            trainer.accumulate_grad_batches, self._accumulates = self._accumulates, 0
        if self._has_evaluated:
            # A restart does not evaluate again, and early stopping counts.
            self._has_evaluated = False
            self._state["callbacks"] = self._state["callbacks"] | _states_of(
                [one for one in _others(trainer, self) if not _acts_at_batch_start(one)]
            )
        self._kept.step_begin()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """From here on optimizer, schedulers, scaler and loops change."""
        self._kept.commit_begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """All of them have changed, if gradients were not only accumulated."""
        if self._kept.is_committing:
            self._state.update(_state_of(trainer, self))
            self._kept.step_end()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What a validation draws does not count: it is not made again after a restart."""
        if self._keeper is not None:
            self._has_evaluated = True
            self._keeper.redraw()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Callbacks may act now, as after a validation."""
        self._has_evaluated = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the last state, also on the disk if there are checkpoints."""
        self._kept.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The same, if the restored training was over, and no loop has run."""
        self._kept.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep the last complete step."""
        if self._keeper is not None:
            self._keeper.close(exception)

    @property
    def _kept(self) -> Keeper:
        assert self._keeper is not None
        return self._keeper


class _CallbackRecord:
    """A state as an object: it may change between two steps."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.update(state)


def _state_of(trainer: Any, own: Callback) -> dict[str, Any]:
    """Where the loops are, and the states of the other callbacks."""
    loops = trainer.fit_loop.state_dict()
    # Each rank has another position there.
    loops["state_dict"].pop("combined_loader", None)
    states = _states_of(_others(trainer, own))
    return {"loops": loops, "callbacks": states, "accumulates": trainer.accumulate_grad_batches}


def _states_of(callbacks: list[Any]) -> dict[str, Any]:
    states = {one.state_key: one.state_dict() for one in callbacks}
    kept: dict[str, Any] = cloned({key: state for key, state in states.items() if state})
    return kept


def _acts_at_batch_start(callback: Any) -> bool:
    """Whether a callback may have acted for the step that begins, which comes once more after a failure."""
    names = ("on_train_epoch_start", "on_train_batch_start")
    return any(getattr(type(callback), name) is not getattr(Callback, name) for name in names)


def _load_loops(loop: Any, state: dict[str, Any]) -> None:
    """Let the loops go on after that state, which is of the end of a batch."""
    state = cloned(state)
    batches, epochs = state["epoch_loop.batch_progress"], state["epoch_progress"]
    is_last = batches["is_last_batch"]
    if is_last:
        # The epoch is over. Lightning would see a validation that was interrupted, and count batches from it.
        batches["is_last_batch"] = False
        batches["total"]["completed"] = batches["total"]["ready"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        for counts in (epochs["total"], epochs["current"]):
            counts["processed"] = counts["completed"] = counts["ready"]
    loop.load_state_dict(state)
    if is_last:
        loop.epoch_loop.restarting = loop._restarting = False


def _others(trainer: Any, own: Callback) -> list[Any]:
    return [one for one in trainer.callbacks if one is not own]


def _require_others_possible(others: list[Any]) -> None:
    for one in others:
        kinds = {kind.__name__ for kind in type(one).__mro__}
        why = next((why for name, why in _REFUSED.items() if name in kinds), "")
        if not why and type(one).on_load_checkpoint is not Callback.on_load_checkpoint:
            why = (
                "has a state in on_load_checkpoint, which is called for Lightning's own checkpoints only; give it "
                "state_dict and load_state_dict"
            )
        if why:
            raise ValueError(f"{type(one).__name__} {why}; ElaunchCallback would not be exact with it")


def _require_possible(trainer: Any) -> None:
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"the module has {len(trainer.optimizers)} optimizers, and ElaunchCallback cannot tell where their common "
            "step ends; use one optimizer, or a loop of your own with elaunch.trainer.Keeper"
        )
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise ValueError(
            "ReduceLROnPlateau changes after a validation, not with a step, and would not be restored exactly; use "
            "another scheduler"
        )
    if trainer.ckpt_path is not None:
        raise ValueError(
            f"fit(ckpt_path={trainer.ckpt_path!r}) restores another state after ElaunchCallback has; leave it out: "
            "ElaunchCallback(checkpoints=…) restores from memory and from its own checkpoints"
        )


def _share_no_buffers(model: Any) -> None:
    """With manual optimization Lightning lets DDP share buffers before the first of all passes only.

    A restart must not do it again, and each rank's own ones are kept.
    """
    model.broadcast_buffers = model.forward_sync_buffers = False


def _warn_of_hooks(parts: list[Any]) -> None:
    """Name the program's own hooks that are not called after a restart."""
    for name, when in (("on_train_epoch_start", " that goes on within an epoch"), ("on_load_checkpoint", "")):
        for one in parts:
            home = next((kind.__module__ for kind in type(one).__mro__ if name in vars(kind)), "lightning")
            if not home.startswith(("lightning", "pytorch_lightning")):
                print(
                    f"{type(one).__name__}.{name} is not called after a restart{when}: keep what it sets in the "
                    "module's buffers, or make it depend on current_epoch where it is used",
                    file=sys.stderr,
                    flush=True,
                )
