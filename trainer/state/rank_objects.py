"""Per-rank state: the loader's position, the generators, the communication hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from elaunch.trainer.state.tree import State, cloned


class Stateful(Protocol):
    """What torchdata, torch and Lightning call stateful."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class GeneratorState:
    """A `torch.Generator` as a Stateful object."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"].clone())


class RankObjects:
    """The objects of this rank, whose states are kept together with the number of ranks.

    At another world size a rank's share of the data differs. Then the states do not fit, and all of them start over.
    After a restore `missed` is why this rank's objects were not restored, and empty if they were.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects: list[Stateful] = [_stateful(one) for one in objects]
        self.kinds = [type(one).__qualname__ for one in self._objects]
        self.missed = ""
        # What was loaded, until the first step after that: `state_dict` of torchdata's loader makes an iterator, and
        # the program may still set its sampler's epoch.
        self._loaded: State | None = None

    def expect_restore(self) -> None:
        """Until `load_state_dict`, the objects count as not restored."""
        self.missed = "is lost" if self._objects else ""

    def state_dict(self) -> State:
        if self._loaded is not None:
            return self._loaded
        return {"world_size": _world_size(), "states": [one.state_dict() for one in self._objects]}

    def forget_loaded(self) -> None:
        """Read the objects again, since a step has begun."""
        self._loaded = None

    def load_state_dict(self, state: State, *, is_older: bool = False) -> None:
        """Load them, if the world size is the same. The objects may keep the values: pass a copy."""
        if state["world_size"] != _world_size():
            self.missed = f"is that of {state['world_size']} ranks, and does not fit {_world_size()} ranks"
            return
        self._loaded = cloned(state)
        for one, its in zip(self._objects, state["states"], strict=True):
            one.load_state_dict(its)
        self.missed = "is that of an earlier step" if is_older else ""

    def missed_sentence(self, missed: Sequence[str]) -> str:
        """One sentence about all ranks, from `missed` of each; empty if all of them were restored."""
        reasons = dict.fromkeys(why for why in missed if why)
        sentences = []
        for why in reasons:
            ranks = [str(rank) for rank, its in enumerate(missed) if its == why]
            whose = "all ranks" if len(ranks) == len(missed) else f"rank {', '.join(ranks)}"
            then = "samples are repeated" if "earlier" in why else "it starts over, and samples are repeated or skipped"
            sentences.append(f"the state per rank (per_rank: {', '.join(self.kinds)}) of {whose} {why}: {then}")
        return "; ".join(sentences)


def _stateful(one: Any) -> Stateful:
    if isinstance(one, torch.Generator):
        return GeneratorState(one)
    if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        raise TypeError(
            f"per_rank has a {type(one).__qualname__}, which has no state_dict and load_state_dict; for a DataLoader "
            "pass elaunch.trainer.Batches(loader), or use torchdata's StatefulDataLoader"
        )
    return cast(Stateful, one)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# The attributes of torch's PowerSGDState that change during training, except its random generator.
_CHANGING = (
    "error_dict",
    "p_memory_dict",
    "q_memory_dict",
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


class HookState:
    """A hook's state as plain values and tensors: its own `state_dict`, or the attributes of PowerSGD's state."""

    def __init__(self, hook_state: Any) -> None:
        self._hook_state = hook_state
        self._is_own = hasattr(hook_state, "state_dict") and hasattr(hook_state, "load_state_dict")
        if not self._is_own and not hasattr(hook_state, "error_dict"):
            raise TypeError(
                f"hook_state is a {type(hook_state).__name__}; give torch's PowerSGDState, or an object with "
                "state_dict() and load_state_dict()"
            )

    def state_dict(self) -> dict[str, Any]:
        """The present state, not copied."""
        if self._is_own:
            state: dict[str, Any] = self._hook_state.state_dict()
            return state
        state = {name: getattr(self._hook_state, name) for name in _CHANGING if hasattr(self._hook_state, name)}
        name, keys, *rest = self._hook_state.rng.get_state()
        return {**state, "rng": (name, keys.tobytes(), *rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. It is not copied, so the caller must not use it afterwards."""
        if self._is_own:
            self._hook_state.load_state_dict(state)
            return
        import numpy

        name, keys, *rest = state["rng"]
        self._hook_state.rng.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
        for name in _CHANGING:
            if name in state:
                setattr(self._hook_state, name, state[name])
