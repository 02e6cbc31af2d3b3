"""The objects of a training run whose state is kept, and that state as nested dictionaries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import randomness
from elaunch.trainer.hookstate import HookState

State = dict[str, Any]


class Training:
    """Model, optimizer and whatever else has a state.

    *Replicated* state is the same on every rank. What is a rank's *own* are its buffers (DDP broadcasts rank 0's at
    each forward pass), the states of its random generators, and, large, the state of a communication hook.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Any = None,
        hook_state: Any = None,
    ) -> None:
        self.model = unwrapped(model)
        self._parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "extra": extra}
        self._hook = None if hook_state is None else HookState(hook_state)
        first = next((p for p in self.model.parameters()), None)
        self.device = torch.device("cpu") if first is None else first.device
        names = self.model.state_dict().keys()
        self._buffers = [
            (name, owner, short)
            for prefix, owner in self.model.named_modules()
            for short, buffer in owner._buffers.items()
            if buffer is not None and (name := f"{prefix}.{short}".lstrip(".")) in names
        ]

    @property
    def has_large(self) -> bool:
        """Whether a rank's own state has a large part."""
        return self._hook is not None

    def layout(self) -> bytes:
        """A digest of what the state is made of: the model's names and shapes, the kinds of the other parts."""
        digest = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            shape = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value)
            digest.update(repr((name, shape)).encode())
        for name, part in self._parts.items():
            digest.update(repr((name, [type(one).__qualname__ for one in _several(part)])).encode())
        return digest.digest()[:16]

    def replicated(self) -> State:
        """The replicated state; its tensors are those that training changes."""
        buffers = {name for name, _, _ in self._buffers}
        model = {name: value for name, value in self.model.state_dict().items() if name not in buffers}
        return {"model": model, **{name: [_state_of(one) for one in _several(p)] for name, p in self._parts.items()}}

    def own(self, *, large: bool = False) -> State:
        """What is this rank's own, now; its tensors are those that training changes, but for the random states."""
        state: State = {"buffers": self.buffers(), "random": randomness.capture(self.device)}
        if large and self._hook is not None:
            state["hook"] = self._hook.state_dict()
        return state

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that its `state_dict` has."""
        return {name: value for name, owner, short in self._buffers if (value := owner._buffers[short]) is not None}

    def load_replicated(self, state: State) -> None:
        """Take over a replicated state; it is copied."""
        self.model.load_state_dict({**state["model"], **self.buffers()})
        for name, part in self._parts.items():
            for one, its in zip(_several(part), state[name], strict=True):
                _load(one, cloned(its))

    def load_own(self, state: State, *, only_buffers: bool = False) -> None:
        """Take over a rank's own state; it is copied. `only_buffers` where it was another rank's."""
        with torch.no_grad():
            for name, buffer in self.buffers().items():
                if name in state["buffers"]:
                    buffer.copy_(state["buffers"][name])
        if not only_buffers:
            randomness.apply(state["random"], self.device)
            if self._hook is not None and "hook" in state:
                self._hook.load_state_dict(cloned(state["hook"], self.device))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DDP and `torch.compile` around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def cloned(value: Any, device: torch.device | None = None) -> Any:
    """The same nest of dictionaries, lists and tuples with copies of its tensors, on `device` if it is given."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = cloned(item, device)
        return copy
    if type(value) in (list, tuple):
        return type(value)(cloned(item, device) for item in value)
    return value


def _several(part: Any) -> Sequence[Any]:
    """A part may be one object, several, or none."""
    if part is None:
        return ()
    return part if isinstance(part, list | tuple) else (part,)


def _state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else part


def _load(part: Any, state: Any) -> None:
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    else:
        part.clear()
        part.update(state)
