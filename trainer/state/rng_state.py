"""The states of all random generators of a training step: Python's, numpy's, torch's on CPU and GPU."""

from __future__ import annotations

import random
import sys
from array import array

import torch

from elaunch.trainer.state.tree import State


def capture(device: torch.device) -> State:
    """The present states of the generators, as plain values and tensors; numpy's only if numpy is imported."""
    # As bytes, since hundreds of numbers take ten times as long to store.
    version, numbers, gauss = random.getstate()
    state: State = {"python": (version, array("I", numbers).tobytes(), gauss), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        state["numpy"] = (name, keys.tobytes(), *rest)
    return state


def apply(state: State, device: torch.device) -> None:
    """Set the generators to the states that `capture` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), device)
    if "numpy" in state and "numpy" in sys.modules:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
