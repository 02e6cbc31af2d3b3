"""The states of all random generators of a training step: Python's, numpy's, torch's on CPU and GPU."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from typing import Any
from zlib import crc32

import torch

from elaunch.trainer.state.tree import State

# numpy's mt19937_state: 624 numbers of 32 bits, and the position among them as a C int.
_KEYS_BYTES = 624 * 4
_RAW_BYTES = _KEYS_BYTES + ctypes.sizeof(ctypes.c_int)


class RandomStates:
    """The generators' states, looked at several times in each step: mostly nothing has been drawn since."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy = _Numpy()
        self._state: State = {}
        self._numbers: tuple[Any, ...] = ()

    def capture(self) -> State:
        """The present states, as plain values and tensors; numpy's only if numpy is imported.

        The same object as before if they are the same as before. Do not change it.
        """
        numbers, old = random.getstate(), self._state
        now: State = {"torch": torch.get_rng_state()}
        if self._device.type == "cuda":
            now["cuda"] = torch.cuda.get_rng_state(self._device)
        numpy = self._numpy.capture()
        if numpy is not None:
            now["numpy"] = numpy
        is_same = (
            old
            and numbers == self._numbers
            and numpy is old.get("numpy")
            and all(torch.equal(now[name], old[name]) for name in ("torch", "cuda") if name in now)
        )
        if not is_same:
            version, words, gauss = self._numbers = numbers
            # As bytes, since hundreds of numbers take ten times as long to store.
            self._state = {"python": (version, array("I", words).tobytes(), gauss), **now}
        return self._state


class _Numpy:
    """numpy's global generator. Asking numpy for its state takes more time than all else that a step looks at here."""

    def __init__(self) -> None:
        self._state: Any = None
        self._address, self._raw = 0, b""

    def capture(self) -> Any:
        """Its state, the same object as before if it is the same as before; None if numpy is not imported."""
        module: Any = sys.modules.get("numpy.random")
        if module is None:
            return None
        address = _address_of(module)
        if address and address == self._address and ctypes.string_at(address, _RAW_BYTES) == self._raw:
            return self._state
        self._address = 0
        if not address:
            # Plain values, of which each kind of generator has others.
            state = _plain(module.get_state(legacy=False))
            self._state = self._state if state == self._state else state
            return self._state
        name, keys, position, has_gauss, gauss = module.get_state()
        state = (name, keys.tobytes(), position, has_gauss, gauss)
        self._state = self._state if state == self._state else state
        # A normal number that numpy has in store is the only part of its state that is not in these bytes. It gets one
        # only by drawing others, so the bytes tell everything while it has none.
        self._raw = state[1] + position.to_bytes(_RAW_BYTES - _KEYS_BYTES, sys.byteorder)
        if not has_gauss and ctypes.string_at(address, _RAW_BYTES) == self._raw:
            self._address = address
        return self._state


def _address_of(module: Any) -> int:
    """Where numpy's global generator has its state; 0 if that is not known, or if it is another kind of generator."""
    generator: Any = getattr(module.get_state.__self__, "_bit_generator", None)
    return generator.ctypes.state_address if type(generator) is module.MT19937 else 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def step_aside(state: State, device: torch.device, step: int) -> None:
    """Seed the generators with numbers that depend on `state`, which `RandomStates.capture` returned, and on `step`."""
    random.seed(crc32(state["python"][1], step))
    torch.default_generator.manual_seed(_digest(state["torch"], step))
    if "cuda" in state:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(_digest(state["cuda"], step))
    if "numpy" in state and not isinstance(state["numpy"], dict):
        sys.modules["numpy.random"].seed(crc32(state["numpy"][1], step + state["numpy"][2]))


def _digest(numbers: torch.Tensor, step: int) -> int:
    return crc32(ctypes.string_at(numbers.data_ptr(), numbers.nbytes), step)


def apply(state: State, device: torch.device) -> None:
    """Set the generators to the states that `RandomStates.capture` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), device)
    if "numpy" in state and "numpy" in sys.modules:
        import numpy

        if isinstance(state["numpy"], dict):
            numpy.random.set_state(state["numpy"])
            return
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
