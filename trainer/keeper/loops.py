"""The loops over a Keeper's steps: one that was left by `break` ends at the same step after a restart."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from elaunch.trainer.ranks.peers import Peers


class Loops:
    """The loops of this process, each named by the step that it counts up to.

    `path` lists the loops that were left, each with the step after which that was, in the node's memory; None without
    such a memory. After a restart all ranks create it together. `tell` takes a sentence from one rank.
    """

    def __init__(self, path: Path | None, peers: Peers, tell: Callable[[str], object], *, is_restart: bool) -> None:
        self._path, self._tell = path, tell
        self._left: dict[int, int] = {}
        for its in peers.from_all(self._read()) if is_restart else ():
            self._left |= its
        self._to_leave = dict(self._left)
        # The step that the loops of this process have come to.
        self._come_to = -1
        self._is_leaving = False

    def begin(self, total: int, step: int) -> bool:
        """A loop up to `total` begins after `step`. Returns whether it has steps to give.

        The first one that an earlier process left has none. Raises ValueError if an earlier loop of this process has
        come to `total`.
        """
        if total <= self._come_to:
            raise ValueError(
                f"steps({total}) has nothing to do: an earlier loop of this program has come to step {self._come_to}, "
                "and `total` counts the steps of the whole training. Epochs are `for epoch, steps in "
                f"keeper.epochs(how_many, {total}):`, and in it `for step in steps:`"
            )
        self.settle(has_left=True)
        if self._to_leave.pop(total, step + 1) <= step:
            self._tell(f"the loop up to step {total} ends after step {self._left[total]}, where it was left before")
            return False
        if step < total and self._left.pop(total, None) is not None:
            self._write()
        return step < total

    def end_of(self, total: int) -> int:
        """The step after which the loop up to `total` ends."""
        return self._left.get(total, total)

    def ended(self, total: int, step: int) -> None:
        """The loop up to `total` is at its end, after `step`."""
        if step >= total:
            self._come_to = max(self._come_to, total)

    def left(self, total: int, step: int) -> None:
        """The loop up to `total` was left after `step`, by `break`, `return` or an exception: `settle` knows which.

        An exception closes a generator as `break` does, so nothing is written before.
        """
        self._left[total], self._is_leaving = step, True

    def settle(self, *, has_left: bool) -> None:
        """The program is past the loop that was left last, or without `has_left` an exception has come from it."""
        if self._is_leaving and has_left:
            self._write()
        self._is_leaving = False

    def _read(self) -> dict[int, int]:
        with contextlib.suppress(OSError, ValueError):
            if self._path is not None:
                return {int(total): step for total, step in json.loads(self._path.read_text()).items()}
        return {}

    def _write(self) -> None:
        # Without room for so little there is no state to restore either.
        with contextlib.suppress(OSError):
            if self._path is not None:
                new = self._path.with_name(f"{self._path.name}-{os.getpid()}")
                new.write_text(json.dumps(self._left))
                new.replace(self._path)
