"""Loads an optimizer's state out of memory that others will overwrite, without a copy in host memory of all of it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elaunch.trainer.state.tree import State, cloned


def load(optimizer: Any, saved: State) -> None:
    """Load `saved`, bit for bit; the optimizer keeps none of its tensors.

    torch moves each value to its parameter's device, which makes a copy there. It keeps a value that is there already,
    and changes a value's type to its parameter's. Both are put right here, value by value.
    """
    if not isinstance(optimizer, Optimizer) or type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        # Nobody knows what it does with the tensors.
        optimizer.load_state_dict(cloned(saved))
        return
    optimizer.load_state_dict(saved)
    rest = dict(saved["state"])
    for group, its in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], its["params"], strict=True):
            if number in rest:
                optimizer.state[parameter] = _own(optimizer.state[parameter], rest.pop(number))
    for key, value in rest.items():
        optimizer.state[key] = cloned(value)


def _own(loaded: Any, saved: Any) -> Any:
    """`loaded` with the types of `saved`, and without its memory."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        is_shared = loaded.device == saved.device and loaded.data_ptr() == saved.data_ptr()
        return saved.to(loaded.device, copy=True) if is_shared or loaded.dtype != saved.dtype else loaded
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded:
            loaded[key] = _own(loaded[key], saved.get(key))
    elif type(loaded) in (list, tuple) and type(saved) in (list, tuple) and len(loaded) == len(saved):
        return type(loaded)(map(_own, loaded, saved))
    return loaded


def require_uncaptured(optimizer: Any) -> None:
    """Raise ValueError if a CUDA graph may hold the optimizer's state: a restore puts other tensors in its place."""
    groups, state = getattr(optimizer, "param_groups", ()), getattr(optimizer, "state", None)
    if state and any(group.get("capturable") for group in groups) and has_cuda_graphs():
        raise ValueError(
            f"{type(optimizer).__name__} has capturable=True and a state, and this process has CUDA graphs: a graph "
            "that holds that state would go on with it after a restore, and not with the restored one; enter the "
            "Keeper first, then warm up and capture, and put graph.replay() into `with keeper.commit():`"
        )


def has_cuda_graphs() -> bool:
    """Whether this process has captured a CUDA graph that it still has. torch has no list of them."""
    return any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())
