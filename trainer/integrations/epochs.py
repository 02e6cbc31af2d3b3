"""Epochs of a loop over a prepared DataLoader, each begun where an earlier process was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from elaunch.trainer.data.batches import (
    drawn_by,
    first_iterator,
    generator_states,
    own_states_of,
    require_drawable_again,
    require_skippable,
    set_generator_states,
    set_own_states_of,
    skip_once,
)
from elaunch.trainer.data.order_states import Streams
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import several


class EpochOrder:
    """The generators from which a sampler draws, as they were when the epoch began. Stateful, for `per_rank`.

    The loader's and its samplers' own ones are also kept as they are now: so they are when the next epoch begins.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._base: Any = None
        self._began: dict[str, Any] = {}
        self._now: Any = None
        # How many epochs have begun, and whether the order was tried.
        self._epoch, self._is_tried = 0, False
        # What `skip_once` needs in the epoch that another process began.
        self._drawn: dict[str, Any] = {}

    def begin(self, loader: Any, base: Any) -> None:
        """An epoch begins, and its order is drawn next. `base` is the DataLoader in `loader`."""
        if self._now is not None:
            # The epoch before was another process's.
            set_own_states_of(loader, self._now)
        self._loader, self._base, self._now = loader, base, None
        self._began = generator_states(loader) | {"seeds": Streams.seeds()}
        if not self._is_tried:
            self._is_tried = True
            # Its generators may have other names in `loader`.
            require_drawable_again(base, self._began | {"own": own_states_of(base)})
        self._epoch += 1
        skip_once(base, 0, began=self._began, epoch=self._epoch)

    def begin_again(self, loader: Any, base: Any, done: int) -> None:
        """The epoch that another process began begins once more, after `done` batches."""
        if not self._began:
            self.begin(loader, base)
        else:
            set_generator_states(loader, self._began)
            self._loader, self._base, self._now = loader, base, None
        skip_once(base, done, self._drawn, began=self._began, epoch=self._epoch)

    def over(self, loader: Any, base: Any) -> None:
        """Of the epoch that another process began no batch is left: the next one begins where it ended."""
        if self._now is not None:
            set_own_states_of(loader, self._now)
        self._loader, self._base, self._now = loader, base, None

    def state_dict(self) -> dict[str, Any]:
        """The states at the beginning of the epoch, and the loader's own ones now."""
        if self._loader is None:
            now, drawn = self._now, self._drawn
        else:
            now, drawn = own_states_of(self._loader), drawn_by(self._base)
        return {"began": self._began, "epoch": self._epoch, "now": now, "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over another process's states."""
        self._loader, self._began, self._drawn = None, state["began"], state["drawn"]
        self._epoch, self._now = state["epoch"], state["now"]


class KeptEpochs:
    """A Keeper around a loop over epochs and batches that stays as it is, with commits by hooks on the optimizers.

    `loader` is what the loop iterates, `base` the DataLoader in it, and `outermost` the module that the loop calls.
    A step has `accumulate` batches, the last of an epoch may have fewer. `set_epoch` tells the loader which epoch its
    next iterator is for.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        outermost: nn.Module,
        loader: Any,
        base: Any,
        accumulate: int,
        set_epoch: Callable[[int], object],
        per_rank: Any = (),
        **options: Any,
    ) -> None:
        require_skippable(base)
        self._order = EpochOrder()
        options = with_own({**options, "per_rank": per_rank}, per_rank=self._order)
        self.keeper = Keeper(model, list(optimizers), **options)
        self._outermost, self._loader, self._base, self._accumulate = outermost, loader, base, accumulate
        self._set_epoch = set_epoch
        self._done = 0

    def __enter__(self) -> KeptEpochs:
        self.keeper.__enter__()
        try:
            self.keeper.commit_by_hooks(self._outermost, draws_again=True)
        except ValueError as error:
            self.keeper.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.keeper.__exit__(kind, error, where)

    def step_end(self) -> None:
        """The step's changes are complete: before a collective between the scheduler's step and the next pass."""
        self.keeper.step_end()

    @property
    def done(self) -> int:
        """How many batches of this epoch were done by earlier processes: the loader begins after them."""
        return self._done

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the remaining epochs up to `total`, from 0. The first one begins in its middle, if need be."""
        with self.keeper.loop(total * -(-len(self._loader) // self._accumulate)) as has_steps:
            yield from self._epochs(total if has_steps else 0)

    def _epochs(self, total: int) -> Iterator[int]:
        batches = len(self._loader)
        steps = -(-batches // self._accumulate)
        resumed, done = divmod(self.keeper.step, steps)
        if resumed:
            first_iterator(self._base)
        for epoch in range(resumed, total):
            self._set_epoch(epoch)
            self._done = done * self._accumulate if epoch == resumed else 0
            if epoch > resumed or not done:
                self.keeper.redraw()
                self.keeper.restore_random()
                self._order.begin(self._loader, self._base)
            else:
                # The generators of the training are restored when the first step begins.
                self._order.begin_again(self._loader, self._base, self._done)
            yield epoch
            self.keeper.step_end()
            if self.keeper.step != (epoch + 1) * steps:
                raise RuntimeError(
                    f"after epoch {epoch} the optimizer has made {self.keeper.step} steps, and not "
                    f"{(epoch + 1) * steps}: {batches} batches, {self._accumulate} for a step; a restart would not "
                    "find the right batch"
                )


def require_free(owner: str, options: Mapping[str, Any], way_out: str, *more: str) -> None:
    """Raise ValueError if `options` has what the integration `owner` takes from its library, or one of `more`."""
    taken = [name for name in ("model", "optimizer", "scheduler", "scaler", *more) if name in options]
    if taken:
        raise ValueError(f"{owner} has no option {' or '.join(taken)}: {way_out}")


def with_own(options: Mapping[str, Any], *, per_rank: Any, extra: Any = None) -> dict[str, Any]:
    """`options`, with the integration's objects before those of the program."""
    given = options.get("extra")
    # As for the Keeper, a list of anything else is one part.
    is_one = type(given) is list and not (given and all(isinstance(one, dict) or _is_object(one) for one in given))
    parts = (given,) if is_one else tuple(several(given))
    own = {"per_rank": (per_rank, *several(options.get("per_rank")))}
    return {**options, **own} if extra is None else {**options, **own, "extra": (extra, *parts)}


def _is_object(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
