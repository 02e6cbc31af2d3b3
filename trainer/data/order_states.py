"""Everything from which a sampler draws an epoch's order: global generators, its own ones, counters, lists."""

from __future__ import annotations

import contextlib
import random
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elaunch.trainer.state import rng_state
from elaunch.trainer.state.rng_state import RandomStates

# They have no other state than a generator, and draw from it as an epoch begins.
_TORCHS = (
    *(BatchSampler, DistributedSampler, RandomSampler, SequentialSampler),
    *(SubsetRandomSampler, WeightedRandomSampler),
)
# A list that a sampler shuffles in place is kept up to so many numbers: it is written with each step.
_NUMBERS_MAX = 8192
_ITEMS_MAX = 64
# The key of a list among kept values, and up to how many numbers it stays a list.
_LIST, _WORDS_MAX = "list of numbers", 8
_CPU = torch.device("cpu")
_END = object()

Item = TypeVar("Item")


def is_torchs(sampler: Any, *, alone: bool = False) -> bool:
    """Whether it is a sampler of torch, or none at all; with `alone` what is in a BatchSampler does not count."""
    if type(sampler) is BatchSampler and not alone:
        return is_torchs(sampler.sampler)
    return sampler is None or type(sampler) in _TORCHS


def own_states(roots: dict[str, Any]) -> dict[str, Any]:
    """The states of the generators, counters and short lists in reach of `roots` (samplers), by their places."""
    return {place: _get(owner) for place, owner in _holders(roots)}


def set_own_states(roots: dict[str, Any], states: dict[str, Any]) -> None:
    """Set them to what `own_states` returned, of these objects or of others that were made alike."""
    for place, owner in [*_holders(roots)]:
        if place in states:
            _set(owner, states[place])


def global_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators."""
    return RandomStates(_CPU).capture()


def set_global_states(states: dict[str, Any]) -> None:
    """Set them to what `global_states` returned, or only torch's if there is no other."""
    if "python" in states:
        rng_state.apply(states, _CPU)
    else:
        torch.set_rng_state(states["torch"].clone())


class Streams:
    """Global generators for a sampler alone, so that its order does not depend on what the training draws meanwhile.

    Each is seeded by a number from the program's own generator of that kind: ranks that seed one alike still agree.
    """

    def __init__(self, seeds: dict[str, int]) -> None:
        self._seeds = seeds
        self._random = RandomStates(_CPU)
        self._states: dict[str, Any] = {}

    @staticmethod
    def seeds() -> dict[str, int]:
        """New seeds, one from each generator of the program."""
        seeds = {"torch": int(torch.randint(2**62, ())), "python": random.getrandbits(62)}
        numpy: Any = sys.modules.get("numpy")
        return seeds | ({"numpy": int(numpy.random.randint(2**31))} if numpy else {})

    def drawing(self, begin: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """The items of the iterator that `begin` returns, each drawn from these generators."""
        with self._entered():
            items = begin()
        while True:
            with self._entered():
                item = next(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        outer = self._random.capture()
        if self._states:
            rng_state.apply(self._states, _CPU)
        else:
            torch.default_generator.manual_seed(self._seeds["torch"])
            random.seed(self._seeds["python"])
            numpy: Any = sys.modules.get("numpy")
            if numpy and "numpy" in self._seeds:
                numpy.random.seed(self._seeds["numpy"])
        try:
            yield
        finally:
            self._states = self._random.capture()
            rng_state.apply(outer, _CPU)


# A generator, or an object and the name of its attribute.
_Holder = Any


def _holders(roots: dict[str, Any]) -> Iterator[tuple[str, _Holder]]:
    seen: set[int] = set()
    for name, root in roots.items():
        yield from _in_reach(name, root, seen)


def _in_reach(place: str, value: Any, seen: set[int]) -> Iterator[tuple[str, _Holder]]:
    if id(value) in seen:
        return
    if _is_generator(value):
        seen.add(id(value))
        yield place, value
    elif type(value) in (list, tuple, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items if len(value) <= _ITEMS_MAX else ():
            yield from _in_reach(f"{place}.{key}", item, seen)
    elif _is_sampler(value):
        seen.add(id(value))
        for name, item in [*vars(value).items()]:
            if _is_plain(item) and type(value) not in _TORCHS:
                yield f"{place}.{name}", (value, name)
            else:
                yield from _in_reach(f"{place}.{name}", item, seen)


def _is_sampler(value: Any) -> bool:
    """Whether it may be a sampler, or a part of one. A dataset is none, unless it is what gives the order."""
    if not hasattr(value, "__dict__") or isinstance(value, Tensor | nn.Module | DataLoader | type):
        return False
    is_indexed = isinstance(value, Dataset) or hasattr(value, "__getitem__")
    return isinstance(value, IterableDataset) or (hasattr(type(value), "__iter__") and not is_indexed)


def _is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _is_plain(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return len(value) <= _NUMBERS_MAX and all(type(item) is int and abs(item) < 2**63 for item in value)
    if _is_array(value):
        return bool(value.dtype.kind in "biuf" and value.size <= _NUMBERS_MAX)
    return isinstance(value, Tensor) and value.numel() <= _NUMBERS_MAX


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _get(holder: _Holder) -> Any:
    """The state as plain values and tensors."""
    if isinstance(holder, tuple):
        value = getattr(*holder)
        return value.clone() if isinstance(value, Tensor) else _kept(value)
    if isinstance(holder, torch.Generator):
        return holder.get_state()
    if isinstance(holder, random.Random):
        version, words, gauss = holder.getstate()
        return version, array("I", words).tobytes(), gauss
    if hasattr(holder, "get_state"):
        return _kept(holder.get_state(legacy=False))
    bits: Any = getattr(holder, "bit_generator", holder)
    return _kept(bits.state)


def _set(holder: _Holder, state: Any) -> None:
    if isinstance(holder, tuple):
        owner, name = holder
        value, kept = getattr(owner, name), _lists(state)
        # In place, since others may have the same list.
        if (_is_array(value) or isinstance(value, list)) and isinstance(kept, list):
            value[:] = kept
        elif isinstance(value, Tensor):
            value.copy_(kept)
        else:
            setattr(owner, name, kept)
    elif isinstance(holder, torch.Generator):
        holder.set_state(state.clone())
    elif isinstance(holder, random.Random):
        version, words, gauss = state
        holder.setstate((version, tuple(array("I", words)), gauss))
    elif hasattr(holder, "set_state"):
        holder.set_state(_lists(state))
    else:
        bits: Any = getattr(holder, "bit_generator", holder)
        bits.state = _lists(state)


def _kept(value: Any) -> Any:
    """A copy that can be stored. A list is a tensor there, since each of its items would take time in each step."""
    if isinstance(value, dict):
        return {name: _kept(item) for name, item in value.items()}
    if _is_array(value) or isinstance(value, list):
        # A generator's few words of 64 bits have no tensor.
        items = [*value] if isinstance(value, list) else value.tolist()
        return {_LIST: torch.tensor(items) if len(items) > _WORDS_MAX else items}
    return value


def _lists(value: Any) -> Any:
    """The same with lists again."""
    if not isinstance(value, dict):
        return value
    if _LIST in value:
        return value[_LIST].tolist() if isinstance(value[_LIST], Tensor) else value[_LIST]
    return {name: _lists(item) for name, item in value.items()}
