"""The plain `torch.save` of a user's old script."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elaunch.trainer.files import open_regular
from elaunch.trainer.state.model_state import is_sharded, unwrap
from elaunch.trainer.state.optimizer_state import exactly
from elaunch.trainer.state.pickles import require_shallow, require_shallow_value
from elaunch.trainer.state.tree import some

_MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
# DistributedDataParallel's, and torch.compile's.
_WRAPPERS = ("module.", "_orig_mod.")


def load_plain(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Put what a plain `torch.save` left into the model, and into the optimizer if one is given; the rest is returned.

    The file holds a model's `state_dict`, or a dictionary with one under `model`, `model_state_dict` or `state_dict`,
    and an optimizer's under `optimizer` or `optimizer_state_dict`; it may be that of a DDP wrapper or a compiled model.
    Tensors go to where the model's are; no code of the file is run. Raises ValueError, with the model unchanged, where
    the file fits it not.
    """
    content = _load(Path(path))
    key = next((key for key in _MODEL_KEYS if isinstance(content.get(key), Mapping)), None)
    held = content if key is None else content[key]
    weights = {name: value for name, value in held.items() if isinstance(value, Tensor)}
    if not weights:
        raise ValueError(f"{path} holds no model: its keys are {some(map(str, content))}")
    unwrapped = unwrap(model)
    wanted = unwrapped.state_dict()
    weights = _renamed(weights, wanted)
    _require(path, weights, wanted)
    optimizer_key = next((key for key in _OPTIMIZER_KEYS if isinstance(content.get(key), Mapping)), None)
    if optimizer is not None and (key is None or optimizer_key is None):
        raise ValueError(f"{path} holds no optimizer's state; leave the optimizer out to load the model alone")
    _put(unwrapped, weights, optimizer, content[optimizer_key] if optimizer_key else {})
    return {} if key is None else {k: v for k, v in content.items() if k not in (key, optimizer_key)}


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = _read_file(path)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain values, or is torn ({str(error).splitlines()[0]}); "
            "save its state_dicts alone"
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dictionary")
    return content


def _read_file(path: Path) -> Any:
    """What torch.save has put there, a symbolic link too. Raises OSError where it is a pipe or a device."""
    with open_regular(path, follow=True) as file:
        require_shallow(file)
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
        require_shallow_value(content, 4 * os.fstat(file.fileno()).st_size)
    return content


def _renamed(weights: dict[str, Tensor], wanted: Mapping[str, object]) -> dict[str, Tensor]:
    """Without the prefix that a wrapper gave to every name, unless the model's own names have it."""
    while prefix := next((p for p in _WRAPPERS if all(name.startswith(p) for name in weights)), ""):
        if any(name.startswith(prefix) for name in wanted):
            break
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _require(path: str | Path, weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    missing = [name for name in wanted if name not in weights]
    unexpected = [name for name in weights if name not in wanted]
    shapes = [
        f"{name} ({tuple(weights[name].shape)}, not {tuple(wanted[name].shape)})"
        for name in wanted
        if name in weights and isinstance(wanted[name], Tensor) and weights[name].shape != wanted[name].shape
    ]
    faults = [("lacks", missing), ("has, and the model has not,", unexpected), ("has another shape of", shapes)]
    if any(names for _, names in faults):
        said = "; it ".join(f"{verb} {some(names)}" for verb, names in faults if names)
        raise ValueError(f"{path} does not fit the model: it {said}")


def _put(model: nn.Module, weights: dict[str, Tensor], optimizer: Optimizer | None, held: Mapping[str, Any]) -> None:
    if not is_sharded(model):
        there = model.state_dict()
        is_alike = all(value.dtype == there[name].dtype for name, value in weights.items() if name in there)
        model.load_state_dict(weights)
        # If the weights' types were changed on purpose, the optimizer's values follow them.
        with exactly([optimizer] if is_alike else ()):
            if optimizer is not None:
                optimizer.load_state_dict(dict(held))
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if optimizer is not None:
        raise ValueError("the optimizer of a sharded model is not loaded from a plain file; leave it out")
    set_model_state_dict(model, dict(weights.items()), options=StateDictOptions(full_state_dict=True))
