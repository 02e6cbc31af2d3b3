"""Everything from which a sampler draws an epoch's order: global generators, its own ones, counters, lists."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

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

# They have no other state than a generator, and draw from it as an epoch begins. A program may change these attributes.
_ATTRIBUTES = {WeightedRandomSampler: ("weights",), SubsetRandomSampler: ("indices",)}
_TORCHS = (BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, *_ATTRIBUTES)
# A list of a sampler is kept up to so many numbers, a tensor or an array up to so many more: written with each step.
_LIST_MAX, _NUMBERS_MAX = 8192, 1 << 18
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
    return {place: _state_of(_value(*holder)) for place, holder in _holders(roots)}


def set_own_states(roots: dict[str, Any], states: dict[str, Any]) -> None:
    """Set them to what `own_states` returned, of these objects or of others that were made alike."""
    for place, holder in [*_holders(roots)]:
        if place in states:
            _set(*holder, states[place])


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

    def again(self) -> Streams:
        """The same from their beginning."""
        return Streams(self._seeds)

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


# What has a generator or a value, and its name there: an attribute, or an item of a container.
_Holder: TypeAlias = "tuple[Any, Any]"


def _holders(roots: dict[str, Any]) -> Iterator[tuple[str, _Holder]]:
    seen: set[int] = set()
    for name in roots:
        yield from _in_reach(name, (roots, name), seen, is_kept=False)


def _in_reach(place: str, holder: _Holder, seen: set[int], *, is_kept: bool) -> Iterator[tuple[str, _Holder]]:
    """All generators, and with `is_kept` a plain value, at this place."""
    value = _value(*holder)
    if _is_plain(value):
        if is_kept:
            yield place, holder
    elif id(value) not in seen:
        names: dict[Any, bool] = {}
        if _is_generator(value):
            yield place, holder
        elif type(value) in (list, tuple) and len(value) <= _ITEMS_MAX:
            names = dict.fromkeys(range(len(value)), False)
        elif type(value) is dict and len(value) <= _ITEMS_MAX:
            names = dict.fromkeys(value, True)
        elif _is_sampler(value):
            kept = _ATTRIBUTES.get(type(value), ()) if type(value) in _TORCHS else (*vars(value),)
            names = {name: name in kept for name in vars(value)}
        else:
            return
        seen.add(id(value))
        for name, keeps in names.items():
            yield from _in_reach(f"{place}.{name}", (value, name), seen, is_kept=keeps)


def _is_sampler(value: Any) -> bool:
    """Whether it may be a sampler, or a part of one. A dataset is none, unless it is what gives the order."""
    if not hasattr(value, "__dict__") or isinstance(value, Tensor | nn.Module | DataLoader | type):
        return False
    is_indexed = isinstance(value, Dataset) or hasattr(value, "__getitem__")
    # For a DistributedSampler Lightning makes a dataset of a sampler.
    is_wrapped = isinstance(getattr(value, "_sampler", None), Iterable)
    return is_wrapped or isinstance(value, IterableDataset) or (hasattr(type(value), "__iter__") and not is_indexed)


def _is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _is_plain(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) in (list, tuple):
        kind = type(value[0]) if value else int
        return (
            len(value) <= _LIST_MAX
            and kind in (int, float)
            and all(type(item) is kind for item in value)
            and (kind is float or all(abs(item) < 2**63 for item in value))
        )
    return _is_numbers(value) and math.prod(value.shape) <= _NUMBERS_MAX


def _is_numbers(value: Any) -> bool:
    """Whether it is a tensor or an array of numbers."""
    return isinstance(value, Tensor) or (_is_array(value) and value.dtype.kind in "biuf")


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _value(owner: Any, name: Any) -> Any:
    if type(owner) is dict:
        return owner.get(name)
    return owner[name] if type(owner) in (list, tuple) else getattr(owner, name, None)


def _state_of(value: Any) -> Any:
    """The state of a generator, or a copy of a value, as plain values and tensors."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return version, array("I", words).tobytes(), gauss
    if isinstance(value, Tensor):
        return value.clone()
    if _is_generator(value):
        bits = getattr(value, "bit_generator", value)
        value = value.get_state(legacy=False) if hasattr(value, "get_state") else bits.state
    return _kept(value)


def _set(owner: Any, name: Any, state: Any) -> None:
    value = _value(owner, name)
    if value is None and (made := _generator_for(state)):
        value = made
        _put(owner, name, None, made)
    if state is None or not _is_generator(value):
        _put(owner, name, value, _lists(state))
    elif isinstance(value, torch.Generator):
        value.set_state(state.clone())
    elif isinstance(value, random.Random):
        version, words, gauss = state
        value.setstate((version, tuple(array("I", words)), gauss))
    elif hasattr(value, "set_state"):
        value.set_state(_lists(state))
    else:
        bits: Any = getattr(value, "bit_generator", value)
        bits.state = _lists(state)


def _generator_for(state: Any) -> Any:
    """A generator for a sampler that has not made its own yet, if it is the state of one."""
    if isinstance(state, Tensor) and state.dtype == torch.uint8 and state.shape == torch.get_rng_state().shape:
        return torch.Generator()
    is_pythons = isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], bytes)
    return random.Random() if is_pythons else None


def _put(owner: Any, name: Any, value: Any, kept: Any) -> None:
    """Set an attribute, or an item; in place where that can be, since others may have the same list."""
    if isinstance(value, list) and isinstance(kept, list):
        value[:] = kept
    elif isinstance(value, Tensor) and isinstance(kept, Tensor) and value.shape == kept.shape:
        value.copy_(kept)
    elif _is_array(value) and isinstance(kept, list) and len(value) == len(kept):
        value[...] = kept
    else:
        if _is_array(value):
            kept = sys.modules["numpy"].asarray(kept, value.dtype)
        kept = kept.clone() if isinstance(kept, Tensor) else tuple(kept) if isinstance(value, tuple) else kept
        if type(owner) is dict:
            owner[name] = kept
        else:
            setattr(owner, name, kept)


def _kept(value: Any) -> Any:
    """A copy that can be stored. A list is a tensor there, since each of its items would take time in each step."""
    if isinstance(value, dict):
        return {name: _kept(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        is_float = bool(value) and type(value[0]) is float
        long = (
            torch.tensor(value, dtype=torch.float64 if is_float else torch.int64) if len(value) > _WORDS_MAX else None
        )
        return {_LIST: [*value] if long is None else long}
    if _is_array(value):
        # A generator's few words of 64 bits have no tensor.
        if value.size <= _WORDS_MAX or value.dtype.kind not in "biuf" or value.dtype == "uint64":
            return {_LIST: value.tolist()}
        return {_LIST: torch.from_numpy(value.astype("float64" if value.dtype.kind == "f" else "int64"))}
    return value


def _lists(value: Any) -> Any:
    """The same with lists again."""
    if not isinstance(value, dict):
        return value
    if _LIST in value:
        return value[_LIST].tolist() if isinstance(value[_LIST], Tensor) else value[_LIST]
    return {name: _lists(item) for name, item in value.items()}
