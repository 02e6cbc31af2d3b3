"""What each rank alone has of a training's state and what changes outside of commits: it is stored at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elaunch.trainer.memory.records import Records
from elaunch.trainer.state.packing import NotPlain
from elaunch.trainer.state.rank_objects import equal
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State
from elaunch.trainer.state.version import Version


class OwnState:
    """This rank's buffers, random states and `per_rank`, in memory with a step before the step is complete.

    Without `records` nothing is stored. If there was no room once, it is not tried again, and `say` tells so.
    """

    def __init__(self, training: Training, records: Records | None, say: Callable[[str], object]) -> None:
        self._training, self._records, self._say = training, records, say
        # The version that `put_down` took last, which buffers that were, and the rest.
        self._put: tuple[Version | None, object, dict[str, Any]] = (None, None, {})
        self._staged: State = {}
        # Whether the last `put_down` has replaced another state of the same version.
        self.is_replaced = False

    def put_down(self, version: Version, *, unless_same: bool = False) -> bool:
        """Store the present state as that of `version`. Returns whether that was done."""
        own = self._training.own()
        buffers = [(buffer.data_ptr(), buffer._version) for buffer in own.pop("buffers").values()]
        self.is_replaced = False
        if unless_same and version == self._put[0]:
            if buffers == self._put[1] and equal(own, self._put[2]):
                return False
            self.is_replaced = True
        self._put = (version, buffers, own)
        return self._stage(version)

    def redraw(self, version: Version) -> bool:
        """Random numbers may have been drawn since `put_down(version)`: store the generators' present states with it.

        `per_rank` stays: its objects may have fetched the next step's batch already. Returns whether that was done.
        """
        stored, buffers, own = self._put
        random = self._training.random.capture()
        if stored != version or equal(random, own["random"]):
            return False
        self._put = (version, buffers, {**own, "random": random})
        return self._stage(version)

    def of(self, version: Version) -> State:
        """Random states and `per_rank` as of the end of that step: a loop may have drawn or fetched since."""
        if self._put[0] == version:
            return self._put[2]
        own = self._training.own()
        del own["buffers"]
        return own

    def _stage(self, version: Version) -> bool:
        if self._records is None:
            return False
        state = {"buffers": self._training.buffers(), **self._put[2]}
        # Often there is nothing else, and nobody draws random numbers. The same object says so.
        if state["buffers"] or "per_rank" in state or state["random"] is not self._staged.get("random"):
            self._staged = state
        try:
            self._records.stage(version, self._staged)
        except (OSError, NotPlain) as error:
            self._records = None
            why = error.strerror or error if isinstance(error, OSError) else error
            self._say(f"keeps no buffers and random states in memory: {why}")
            return False
        return True
