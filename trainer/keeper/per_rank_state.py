"""What each rank alone has of a training's state, and what changes outside of commits: stored at each step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor

from elaunch.trainer.memory.node_memory import Records
from elaunch.trainer.state import Version
from elaunch.trainer.state.live_tensors import changed_since, versions
from elaunch.trainer.state.packing import NotPlain, not_plain
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State, equal, some

_VERSION = attrgetter("_version")


class PerRankState:
    """This rank's buffers, random states and `per_rank`, in memory with a step before the step is complete.

    Without `records` nothing is stored. After an OSError nothing more is stored, and `log` reports it.
    """

    def __init__(self, training: Training, records: Records | None, log: Callable[[str], object]) -> None:
        self._training, self._records, self._log = training, records, log
        # The last stored version, what `versions` returned for its buffers, and the other state.
        self._stored: tuple[Version | None, dict[str, Any], dict[str, Any]] = (None, {}, {})
        self._staged: State = {}
        # The buffers of that version, and their version counters.
        self._tensors: list[Tensor] = []
        self._counts: list[int] = []
        self._has_reported = False
        # Whether `_stored` is from before the end of the commit, which may change buffers (an average of the weights).
        self._is_begun = False
        # Whether the last `store` has replaced another state of the same version.
        self.is_replaced = False

    def store(self, version: Version, *, unless_same: bool = False, is_begun: bool = False) -> bool:
        """Store the present state as that of `version`, with `is_begun` before its commit. Returns whether it did."""
        training, is_again = self._training, version is self._stored[0] or version == self._stored[0]
        self.is_replaced = False
        if unless_same and is_again and training.random.aside and not (training.per_rank or training.has_buffers):
            return False
        if not is_again and self._stored[0] is not None and training.per_rank is not None:
            training.per_rank.forget_loaded()
        own, present = training.own(), training.buffers()
        has_buffers = present["buffers"] or present["transient"]
        buffers = versions(present) if has_buffers else {}
        have_changed = is_again and buffers != self._stored[1]
        self.is_replaced = is_again and unless_same and not equal(own, self._stored[2])
        if not is_begun:
            training.of_commit = changed_since(self._stored[1], present) if have_changed else {}
        if unless_same and is_again and not (have_changed or self.is_replaced):
            return False
        self._stored, self._is_begun = (version, buffers, own), is_begun
        if has_buffers or self._tensors:
            held = chain.from_iterable(its.values() for its in present.values())
            self._tensors = [one for one in held if one is not None and not one.is_inference()]
            self._counts = [*map(_VERSION, self._tensors)]
        return self._stage(version, present)

    def store_changed(self, version: Version) -> None:
        """Store buffers that a backward pass has changed: gradient checkpointing runs the forward pass again in it."""
        if self._counts != [*map(_VERSION, self._tensors)] and self._stored[0] == version:
            self.store(version, is_begun=True)

    def changed_buffers(self, step: int) -> str:
        """A sentence, once, about buffers that have changed since the commit of `step`; "" if none have."""
        if self._has_reported or self._counts == [*map(_VERSION, self._tensors)]:
            return ""
        now = versions(self._training.buffers())
        names = [f"`{name}`" for name in now if now[name] != self._stored[1].get(name)]
        self._has_reported = bool(names)
        if not names:
            return ""
        return (
            f"the buffers {some(names)} changed between step {step} and the next one. A failure in between restores "
            "the old values, and what changed them is not done again. Change them in keeper.commit(), before "
            "optimizer.step, or in a step before its backward pass; evaluate in training mode with a copy of the model"
        )

    def restored(self, version: Version) -> None:
        """The present state is that of `version`, which is stored: the program may draw before it is stored again."""
        self._stored = (version, versions(self._training.buffers()), self._training.own())

    def redraw(self, version: Version) -> bool:
        """Random numbers may have been drawn since `store(version)`: store the generators' present states with it.

        `per_rank` stays: its objects may have fetched the next step's batch already. Returns whether that was done.
        """
        stored, buffers, own = self._stored
        random = self._training.random.capture()
        if stored != version or equal(random, own["random"]):
            return False
        self._stored = (version, buffers, {**own, "random": random})
        return self._stage(version, self._training.buffers())

    def of(self, version: Version) -> State:
        """Random states and `per_rank` as of the end of that step: a loop may have drawn or fetched since."""
        if self._stored[0] is version or self._stored[0] == version:
            return self._stored[2]
        return self._training.own()

    def is_begun(self, version: Version) -> bool:
        """Whether what is stored of `version` is from before the end of its commit."""
        return self._stored[0] == version and self._is_begun

    def _stage(self, version: Version, buffers: State) -> bool:
        if self._records is None:
            return False
        state = {**buffers, **self._stored[2], "is_begun": self._is_begun}
        # Unchanged random states alone are staged as the same object, so that only a header is written.
        has_objects = bool(state.get("per_rank", {}).get("states"))
        if any(buffers.values()) or has_objects or state["random"] is not self._staged.get("random"):
            self._staged = state
        try:
            self._records.stage(version, self._staged)
        except NotPlain as error:
            found = not_plain(state, "", deeply=True) or str(error)
            raise TypeError(f"the per-rank state: {found}") from None
        except OSError as error:
            self._records = None
            self._log(f"buffers and random states are not kept in memory: {error.strerror or error}")
            return False
        return True
