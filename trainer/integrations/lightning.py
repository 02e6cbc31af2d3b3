"""The Keeper in Lightning's Trainer: `Trainer(…, callbacks=[ElaunchCallback()])`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elaunch.trainer.data.batches import EpochOrder, require_skippable, set_epoch
from elaunch.trainer.integrations import with_own
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import cloned

# The package has two names. The program's own `import` decides.
if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch.callbacks import Callback, Checkpoint
else:
    from pytorch_lightning.callbacks import Callback, Checkpoint

# Lightning's callbacks that change the training outside of a step, and why that cannot be restored.
_REFUSED = {
    "StochasticWeightAveraging": "keeps averaged weights and a scheduler of its own, which no restart restores",
    "BaseFinetuning": "adds parameter groups within the run, which a restarted optimizer does not have",
    "BatchSizeFinder": "trains for a trial before each start; find the size once, and give it to the loader",
    "LearningRateFinder": "trains for a trial before each start; find the rate once, and give it to the optimizer",
}


class ElaunchCallback(Callback):  # type: ignore[misc]
    """Keeps model, optimizer, schedulers, loops and callbacks; `options` are the Keeper's (`checkpoints=…`).

    After a restart the loops continue as from Lightning's own checkpoint, and the batches of the complete steps are
    skipped without loading them.
    """

    def __init__(self, **options: Any) -> None:
        self._options, self._orders = options, _Orders()
        self._keeper: Keeper | None = None
        self._state: dict[str, Any] = {}
        # The step after which the callbacks' states were noted.
        self._noted = -1
        # Whether an earlier process began this epoch.
        self._is_within = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what no restart can restore, before other callbacks run."""
        if stage == "fit":
            others = _others(trainer)
            _require_others_possible(others)
            # A step begins before their hooks, and ends after them. Slow checkpoint callbacks run after that.
            saving = [one for one in others if isinstance(one, Checkpoint)]
            trainer.callbacks = [self, *(one for one in others if one not in saving), _Last(self), *saving]
            if trainer.is_global_zero and os.environ.get("ELAUNCH_GENERATION", "0") == "0":
                _warn_of_hooks([pl_module, trainer.datamodule, *others])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest state."""
        _require_possible(trainer)
        model = trainer.strategy.model
        if not pl_module.automatic_optimization and isinstance(model, DistributedDataParallel):
            # Here Lightning lets DDP broadcast buffers before the very first pass only. A restart must not do it again:
            # each rank keeps its own.
            model.broadcast_buffers = model.forward_sync_buffers = False
        self._state.update(_state_of(trainer), repeats=False)
        self._keeper = Keeper(
            model,
            trainer.optimizers[0],
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **with_own(self._options, per_rank=self._orders, extra=_CallbackRecord(self._state)),
        )
        self._noted, self._is_resumed = -1, self._keeper.restore() > 0
        if self._is_resumed:
            _load_loops(trainer.fit_loop, self._state["loops"], repeats_end=self._state["repeats"])
            for callback in _others(trainer):
                if callback.state_key in self._state["callbacks"]:
                    callback.load_state_dict(cloned(self._state["callbacks"][callback.state_key]))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume within an epoch. The loop has made its iterators already, and makes new ones."""
        loop = trainer.fit_loop
        is_over = self._state["repeats"] and loop.epoch_loop._num_ready_batches_reached()
        trainer.should_stop = trainer.should_stop or self._state["stops"]
        done = loop.epoch_loop.batch_progress.current.ready if self._is_resumed else 0
        self._is_within = done > 0
        if is_over:
            self._orders.over(_loaders_of(trainer))
        elif done:
            self.begin_epoch(trainer, done)
        if self._state["repeats"]:
            self._live_keeper.restore_random()
            # Then Lightning goes to the epoch's end.
            loop.epoch_loop.val_loop._has_run = not _validates_next(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Undo what the end of an epoch drew: a restart does not repeat that."""
        self._note(trainer)
        self._live_keeper.redraw()
        self._live_keeper.restore_random()
        # A resumed epoch without batches left has not reset this.
        trainer.fit_loop.epoch_loop.restarting = False

    def accumulate_again(self, trainer: Any) -> None:
        """Restore what a callback may have set when the epoch began, which Lightning does not repeat."""
        if self._is_resumed:
            trainer.accumulate_grad_batches = self._state["accumulates"]

    def begin_epoch(self, trainer: Any, done: int = 0) -> None:
        """Begin an epoch, whose order other callbacks may have set, or resume one after `done` batches."""
        loop, loaders = trainer.fit_loop, _loaders_of(trainer)
        epoch = loop.epoch_progress.current.processed
        for loader in loaders:
            # With workers, the order is drawn before Lightning sets the epoch.
            set_epoch(loader, epoch)
        self._orders.begin(loaders, done)
        if done or loop.is_resuming or not epoch:
            # Lightning would use the iterators that it made before.
            iter(loop._data_fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Stop here if a stop is requested, and make the copies that are due."""
        self._note(trainer)
        self._live_keeper.step_begin()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the commit: optimizer, schedulers, scaler and loops change."""
        self._live_keeper.commit_begin()

    def end_step(self, trainer: Any) -> None:
        """End the commit, with the callbacks' changes; none if gradients were only accumulated."""
        if self._live_keeper.is_committing:
            self._state.update(_state_of(trainer), repeats=_can_repeat_end(trainer))
            self._live_keeper.step_end()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Make a repeated validation draw the same numbers, whatever its loaders have drawn."""
        self.on_validation_end(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Undo what a validation drew: it must change no step."""
        if self._keeper is not None:
            self._keeper.redraw()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log which monitored means are over a part of the epoch only."""
        if self._is_within and trainer.is_global_zero:
            for one in _monitored_means(trainer):
                _log(f"{one}: in epoch {trainer.current_epoch} that is the mean over the steps since the restart")
        self._is_within = False

    def _note(self, trainer: Any) -> None:
        """Once after each step: record what callbacks have done since, unless a restart repeats it."""
        if self._noted != self._live_keeper.step and not self._state["repeats"]:
            self._noted = self._live_keeper.step
            self._state.update(_outside_of_steps(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the last state, and on disk too if there are checkpoints."""
        self._state.update(_outside_of_steps(trainer), repeats=False)
        self._live_keeper.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the Keeper if the restored training was over, and no loop has run."""
        self._live_keeper.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep the last complete step."""
        if self._keeper is not None:
            self._keeper.close(exception)

    @property
    def _live_keeper(self) -> Keeper:
        assert self._keeper is not None
        return self._keeper


class _Last(Callback):  # type: ignore[misc]
    """Continues within an epoch, begins one and ends a step after the other callbacks have acted there."""

    def __init__(self, callback: ElaunchCallback) -> None:
        self._callback = callback

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._callback.accumulate_again(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._callback.begin_epoch(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._callback.end_step(trainer)


class _Orders:
    """The orders of an epoch's loaders. Stateful, for `per_rank`."""

    def __init__(self) -> None:
        self._orders: list[EpochOrder] = []

    def over(self, loaders: list[Any]) -> None:
        """The epoch that an earlier process began has no batch left."""
        for order, loader in zip(self._orders, loaders, strict=True):
            order.over(loader)

    def begin(self, loaders: list[Any], done: int) -> None:
        """Begin an epoch, or resume an earlier process's after `done` batches."""
        self._orders = self._orders or [EpochOrder() for _ in loaders]
        for order, loader in zip(self._orders, loaders, strict=True):
            order.begin(loader, done)

    def state_dict(self) -> dict[str, Any]:
        return {"orders": [order.state_dict() for order in self._orders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._orders = [EpochOrder() for _ in state["orders"]]
        for order, its in zip(self._orders, state["orders"], strict=True):
            order.load_state_dict(its)


class _CallbackRecord:
    """A state as an object, which may change between two steps."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.update(state)


def _state_of(trainer: Any) -> dict[str, Any]:
    """The loops' progress, and the states of the other callbacks."""
    loop = trainer.fit_loop
    loops = loop.state_dict()
    # It differs between ranks.
    loops["state_dict"].pop("combined_loader", None)
    return {
        "loops": loops,
        "accumulates": trainer.accumulate_grad_batches,
        **_outside_of_steps(trainer),
    }


def _outside_of_steps(trainer: Any) -> dict[str, Any]:
    """What also changes between two steps: the states of the other callbacks, and a request to stop."""
    states = {one.state_key: one.state_dict() for one in _others(trainer)}
    kept = cloned({key: state for key, state in states.items() if state})
    return {"callbacks": kept, "stops": trainer.should_stop}


def _validates_next(trainer: Any) -> bool:
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def _can_repeat_end(trainer: Any) -> bool:
    """Whether a validation or the end of the epoch follows this step, and a restart can repeat it.

    It cannot if a callback compares a mean over the epoch's steps, which a restart loses.
    """
    is_end = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
    return (is_end or _validates_next(trainer)) and not _monitored_means(trainer)


def _monitored_means(trainer: Any) -> list[str]:
    """Which callbacks compare a mean over the epoch's steps."""
    metrics = [one.meta for one in trainer.fit_loop.epoch_loop._results.values() if one.meta.on_epoch]
    means = {name for one in metrics for name in (one.name, one.forked_name(on_step=False))}
    monitors = [(one, getattr(one, "monitor", None)) for one in _others(trainer)]
    return [f"{type(one).__name__} monitors `{monitor}`" for one, monitor in monitors if monitor in means]


def _load_loops(loop: Any, state: dict[str, Any], *, repeats_end: bool) -> None:
    """Resume the loops after that state, taken at the end of a batch."""
    state = cloned(state)
    batches, epochs = state["epoch_loop.batch_progress"], state["epoch_progress"]
    if repeats_end:
        # To Lightning it is a validation that was interrupted in its first batch.
        for counts in (batches["total"], batches["current"]):
            counts["completed"] = counts["ready"]
        validated = state["epoch_loop.val_loop.batch_progress"]
        for counts in (validated["total"], validated["current"]):
            counts.update(ready=1, started=1, processed=0, completed=0)
        loop.load_state_dict(state)
        return
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


def _others(trainer: Any) -> list[Any]:
    return [one for one in trainer.callbacks if not isinstance(one, ElaunchCallback | _Last)]


def _loaders_of(trainer: Any) -> list[Any]:
    """The loaders of an epoch. Raises ValueError if a restart could not continue within them."""
    combined = trainer.fit_loop._combined_loader
    loaders: list[Any] = combined.flattened
    for loader in loaders:
        if not isinstance(loader, DataLoader):
            raise ValueError(
                f"a {type(loader).__name__} is among the training's loaders, and after a restart it would begin at its "
                "first batch again; give Lightning a DataLoader"
            )
        require_skippable(loader)
        if combined._mode == "max_size_cycle" and len(loader) < len(combined):
            raise ValueError(
                f"one of the training's loaders has {len(loader)} batches, and an epoch {len(combined)}: Lightning "
                "begins it again within the epoch, which a restart could not repeat; use loaders of the same length, "
                'or CombinedLoader(…, mode="min_size") or "max_size"'
            )
    return loaders


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
            f"the module has {len(trainer.optimizers)} optimizers, and ElaunchCallback cannot determine where their "
            "common step ends; use one optimizer, or a loop of your own with elaunch.trainer.Keeper"
        )
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise ValueError(
            "ReduceLROnPlateau changes after a validation, not with a step, and would not be restored exactly; use "
            "another scheduler"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            f"Trainer(reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}) makes loaders at "
            "other epochs after a restart than before; leave it out, and let a sampler with set_epoch(epoch), or one "
            "that a callback changes in on_train_epoch_end, give each epoch its samples"
        )
    if trainer.ckpt_path is not None:
        raise ValueError(
            f"fit(ckpt_path={trainer.ckpt_path!r}) restores another state after ElaunchCallback has; leave it out: "
            "ElaunchCallback(checkpoints=…) restores from memory and from its own checkpoints"
        )


def _warn_of_hooks(parts: list[Any]) -> None:
    """Name the program's own hooks that are not called after a restart."""
    for name, when in (("on_train_epoch_start", " that continues within an epoch"), ("on_load_checkpoint", "")):
        for one in parts:
            home = next((kind.__module__ for kind in type(one).__mro__ if name in vars(kind)), "lightning")
            if not home.startswith(("lightning", "pytorch_lightning")):
                _log(
                    f"{type(one).__name__}.{name} is not called after a restart{when}: keep what it sets in the "
                    "module's buffers, or make it depend on current_epoch where it is used"
                )


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
