"""The states of all random generators of a training step: Python's, numpy's, torch's on CPU and GPU."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from array import array
from typing import Any
from zlib import crc32

import torch

from elaunch.trainer.state.tree import State

# numpy's mt19937_state: 624 numbers of 32 bits, and the position among them as a C int.
_INT_BYTES = ctypes.sizeof(ctypes.c_int)
_COMPARED = 5


class RandomStates:
    """The generators' states, compared several times per step, mostly without a draw between."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._python, self._numpy = _Python(), _Numpy()
        self._state: State = {}
        self._raw: list[bytes] = []
        # The states before `step_aside`, if that was called, and not `apply` since.
        self.aside: State | None = None

    def capture(self) -> State:
        """The present states, as plain values and tensors; numpy's only if numpy is imported.

        The same object as before if nothing has changed; do not modify it. After `step_aside`, those before it.
        """
        if self.aside is not None:
            return self.aside
        old, python, numpy = self._state, self._python.capture(), self._numpy.capture()
        torchs = [torch.default_generator.get_state()]
        if self._is_cuda:
            torchs.append(torch.cuda.get_rng_state(self._device))
        raw = [*map(_bytes, torchs)]
        if not (old and python is old["python"] and numpy is old.get("numpy") and raw == self._raw):
            self._raw = raw
            self._state = {"python": python, **dict(zip(("torch", "cuda"), torchs, strict=False))}
            self._state |= {} if numpy is None else {"numpy": numpy}
        return self._state

    def step_aside(self, state: State, step: int) -> None:
        """Seed the generators with numbers that depend on `state`, the states to continue from, and on `step`."""
        self.aside = state
        raw = self._raw if state is self._state else [_bytes(state[n]) for n in ("torch", "cuda") if n in state]
        random.seed(crc32(state["python"][1], step))
        torch.default_generator.manual_seed(crc32(raw[0], step))
        if "cuda" in state:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(crc32(raw[1], step))
        if "numpy" in state and not isinstance(state["numpy"], dict):
            self._numpy.seed(crc32(state["numpy"][1], step + state["numpy"][2]))

    def apply(self, state: State) -> None:
        """Set the generators to `state`, which `capture` returned or a restore has loaded."""
        self.aside = None
        if self._numpy.reset_to(state.get("numpy")):
            state = {name: its for name, its in state.items() if name != "numpy"}
        apply(state, self._device)


class _Python:
    """Python's global generator."""

    _mark: Any = None
    _state: Any = None

    def capture(self) -> Any:
        """Its state, the same object as before if it has not changed."""
        version, numbers, gauss = random.getstate()
        # Each draw changes the position, which is the last number, or all numbers: a few show it.
        mark = numbers[-_COMPARED:], gauss
        if mark != self._mark:
            self._mark = mark
            # As bytes, since hundreds of numbers take ten times as long to store.
            self._state = (version, array("I", numbers).tobytes(), gauss)
        return self._state


class _Numpy:
    """numpy's global generator, whose state is the same object while its bytes in memory are the same.

    Getting the state from numpy takes more time than all else that a step compares here.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._generator: Any = None
        self._seeded = b""
        # The address of its bytes, or 0; the memory there, and its content when the state was taken.
        self._address, self._memory, self._raw = 0, ctypes.create_string_buffer(0), b""

    def capture(self) -> Any:
        """Its state, the same object as before if it has not changed; None if numpy is not imported."""
        module: Any = sys.modules.get("numpy.random")
        if module is None:
            return None
        if self._address and _generator_of(module) is self._generator and self._memory.raw == self._raw:
            return self._state
        # A reference, so that no other generator gets this address.
        self._generator = _generator_of(module)
        address = self._generator.ctypes.state_address if type(self._generator) is module.MT19937 else 0
        if not address:
            # Plain values, which differ by the type of the generator.
            return self._note(_plain(module.get_state(legacy=False)), b"", 0)
        name, keys, position, has_gauss, gauss = module.get_state()
        state = (name, keys.tobytes(), position, has_gauss, gauss)
        # A cached normal number (`gauss`) is the only part of numpy's state that is not in these bytes. Only a draw
        # caches one, so the bytes are the whole state while there is none.
        raw = state[1] + position.to_bytes(_INT_BYTES, sys.byteorder)
        return self._note(state, raw, 0 if has_gauss else address)

    def _note(self, state: Any, raw: bytes, address: int) -> Any:
        """`raw` represents the whole state, and is at `address` unless that is another generator's."""
        self._state = self._state if state == self._state else state
        self._address, self._raw = address, raw
        self._memory = (ctypes.c_char * len(raw)).from_address(address) if address else ctypes.create_string_buffer(0)
        if self._memory.raw != raw:
            self._address = 0
        return self._state

    def seed(self, number: int) -> None:
        """Seed it, for `reset_to`."""
        sys.modules["numpy.random"].seed(number)
        self._seeded = self._memory.raw

    def reset_to(self, state: Any) -> bool:
        """Reset it to `state`, the last one here, if only `seed` followed: numpy's `set_state` takes 35 µs."""
        is_last = (
            self._address and state is self._state and _generator_of(sys.modules["numpy.random"]) is self._generator
        )
        if not is_last or self._memory.raw != self._seeded:
            return False
        self._memory.raw = self._raw
        return True


def _generator_of(module: Any) -> Any:
    return getattr(module.get_state.__self__, "_bit_generator", None)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def apply(state: State, device: torch.device) -> None:
    """Set the generators to the states that `RandomStates.capture` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, _words(numbers), gauss))
    # torch would read a view from the beginning of its storage.
    numbers = state["torch"]
    torch.default_generator.set_state(numbers.clone() if numbers.storage_offset() else numbers)
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), device)
    if "numpy" in state and "numpy" in sys.modules:
        import numpy

        if isinstance(state["numpy"], dict):
            numpy.random.set_state(state["numpy"])
            return
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _bytes(numbers: torch.Tensor) -> bytes:
    # Faster than ctypes.string_at.
    return (ctypes.c_char * numbers.nbytes).from_address(numbers.data_ptr()).raw


@functools.lru_cache(maxsize=2)
def _words(content: bytes) -> tuple[int, ...]:
    return tuple(array("I", content))
