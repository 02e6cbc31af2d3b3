"""Loads an optimizer's state bit for bit, and out of memory that others will overwrite, without a copy of all of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elaunch.trainer.state.tree import State, cloned, put_into, some


def load(optimizer: Any, saved: State) -> None:
    """Load `saved`, bit for bit; the optimizer keeps none of its tensors."""
    theirs, ours = [
        [len(group["params"]) for group in groups]
        for groups in (saved.get("param_groups", ()), getattr(optimizer, "param_groups", ()))
    ]
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"the kept state of {type(optimizer).__name__} has groups of {some(map(str, theirs), 9)} parameters, and "
            f"this program has groups of {some(map(str, ours), 9)}; make all groups before the Keeper, and train one "
            "from a later step on by its learning rate"
        )
    own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    with exactly([optimizer], copies=True):
        # Nobody knows what a `load_state_dict` of its own does with the tensors.
        optimizer.load_state_dict(cloned(saved) if own else saved)


@contextlib.contextmanager
def exactly(optimizers: Iterable[Any], *, copies: bool = False) -> Iterator[None]:
    """While this lasts, `load_state_dict` of these optimizers keeps every value's type, and its groups' own objects.

    torch changes a value's type to its parameter's, and puts new dictionaries and new tensors (of a learning rate) into
    `param_groups`, where a program may have the old ones. With `copies` the optimizers keep none of the given tensors:
    torch keeps a value that is on its parameter's device already.
    """
    with contextlib.ExitStack() as stack:
        for one in optimizers:
            # Wrappers have the optimizer by these names: ZeroRedundancyOptimizer, Accelerate's.
            for each in (one, getattr(one, "optim", None), getattr(one, "optimizer", None)):
                # Some are Optimizers that never called its `__init__`, and take no hooks.
                if isinstance(each, Optimizer) and "_optimizer_load_state_dict_pre_hooks" in vars(each):
                    load = _Load(copies)
                    stack.callback(each.register_load_state_dict_pre_hook(load.begin).remove)
                    # Before hooks of the program, which may change values on purpose.
                    stack.callback(each.register_load_state_dict_post_hook(load.end, prepend=True).remove)
        yield


class _Load:
    """One optimizer's `load_state_dict`: what it was given, and what it had."""

    def __init__(self, copies: bool) -> None:
        self._copies = copies

    def begin(self, optimizer: Optimizer, saved: State) -> None:
        self._saved, self._groups = saved, optimizer.param_groups

    def end(self, optimizer: Optimizer) -> None:
        rest = dict(self._saved["state"])
        for group, its in zip(optimizer.param_groups, self._saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], its["params"], strict=True):
                if number in rest:
                    optimizer.state[parameter] = self._own(optimizer.state[parameter], rest.pop(number))
        for key, value in rest.items() if self._copies else ():
            optimizer.state[key] = cloned(value)
        for group, loaded in zip(self._groups, optimizer.param_groups, strict=True):
            if group is not loaded:
                put_options(group, loaded)
        # As torch does it: a wrapper may have a property of that name.
        vars(optimizer)["param_groups"] = self._groups

    def _own(self, loaded: Any, saved: Any) -> Any:
        """`loaded` with the types of `saved`, and if that is wanted without its memory."""
        if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
            is_shared = self._copies and loaded.device == saved.device and loaded.data_ptr() == saved.data_ptr()
            if is_shared or loaded.dtype != saved.dtype:
                return saved.to(loaded.device, copy=self._copies)
        elif isinstance(loaded, dict) and isinstance(saved, dict):
            for key in loaded:
                loaded[key] = self._own(loaded[key], saved.get(key))
        elif type(loaded) in (list, tuple) and type(saved) in (list, tuple) and len(loaded) == len(saved):
            return type(loaded)(map(self._own, loaded, saved))
        return loaded


def put_options(group: dict[str, Any], saved: State) -> None:
    """Give a group of parameters the options of `saved`. A tensor among them, as a learning rate, stays the object."""
    for key, value in saved.items():
        if key != "params":
            group[key] = put_into(group.get(key), value)


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
