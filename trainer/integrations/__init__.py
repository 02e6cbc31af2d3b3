"""The Keeper in loops of other libraries: one line each. A module imports its library, and nothing else imports it.

This module has what they share: epochs over a prepared DataLoader, resumed where an earlier process was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from elaunch.trainer.data.batches import EpochOrder, require_skippable
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import several


class KeptEpochs:
    """A Keeper around an unchanged loop over epochs and batches; hooks on the optimizers commit.

    `loader` is what the loop iterates, `base` the DataLoader in it, and `outermost` the module that the loop calls.
    A step has `accumulate` batches; the last of an epoch may have fewer. `set_epoch` sets the epoch of the loader's
    next iterator.
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
        self.keeper = Keeper(model, list(optimizers), per_rank=(self._order, *several(per_rank)), **options)
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
        """End the step. Call it before a collective between the scheduler's step and the next pass."""
        self.keeper.step_end()

    @property
    def done(self) -> int:
        """How many batches of this epoch were done by earlier processes: the loader begins after them."""
        return self._done

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the remaining epochs up to `total`, from 0. The first one may be resumed in its middle."""
        with self.keeper.loop(total * -(-len(self._loader) // self._accumulate)) as has_steps:
            yield from self._epochs(total if has_steps else 0)

    def _epochs(self, total: int) -> Iterator[int]:
        batches = len(self._loader)
        steps = -(-batches // self._accumulate)
        resumed, done = divmod(self.keeper.step, steps)
        for epoch in range(resumed, total):
            self._set_epoch(epoch)
            self._done = done * self._accumulate if epoch == resumed else 0
            if not self._done:
                self.keeper.redraw()
                self.keeper.restore_random()
            # Else the generators of the training are restored when the first step begins.
            self._order.begin(self._base, self._done)
            yield epoch
            self.keeper.step_end()
            if self.keeper.step != (epoch + 1) * steps:
                raise RuntimeError(
                    f"after epoch {epoch} the optimizer has made {self.keeper.step} steps, not "
                    f"{(epoch + 1) * steps}: {batches} batches, {self._accumulate} per step; a restart would not "
                    "find the right batch"
                )


def with_own(options: Mapping[str, Any], *, per_rank: Any, extra: Any) -> dict[str, Any]:
    """`options`, with the integration's objects before those of the program."""
    given = options.get("extra")
    # To the Keeper a list of values is one part, which may grow.
    is_one = type(given) is list and not any(hasattr(one, "state_dict") for one in given)
    parts = (given,) if is_one else several(given)
    return {**options, "per_rank": (per_rank, *several(options.get("per_rank"))), "extra": (extra, *parts)}
