"""The state of a DDP communication hook, different on every rank: PowerSGD's error feedback and factors."""

from __future__ import annotations

from typing import Any

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
