"""The state from which a sampler draws an epoch's order, and the use of `Order`: seeded datasets, micro-batches.

A sampler draws from global generators, or from generators, counters and lists of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
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

from elaunch.trainer.data.order import Micro, Order, Samples
from elaunch.trainer.state import rng_state
from elaunch.trainer.state.rng_state import RandomStates

# Their only state is a generator, from which they draw as an epoch begins. A program may change these attributes.
_ATTRIBUTES = {WeightedRandomSampler: ("weights",), SubsetRandomSampler: ("indices",)}
_TORCHS = (BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, *_ATTRIBUTES)
# A list of a sampler is kept up to _LIST_MAX numbers, a tensor or an array up to _NUMBERS_MAX: written with each step.
_LIST_MAX, _NUMBERS_MAX = 8192, 1 << 18
_ITEMS_MAX = 64
# The keys of a list or an array among stored values: its bytes, their type, and the shape.
_BYTES, _TYPE, _SHAPE = "bytes of numbers", "type", "shape"
_CPU = torch.device("cpu")
_END = object()

Item = TypeVar("Item")


def is_torchs(sampler: Any, *, alone: bool = False) -> bool:
    """Whether it is torch's sampler, or None; with `alone` the sampler in a BatchSampler does not count."""
    if type(sampler) is BatchSampler and not alone:
        return is_torchs(sampler.sampler)
    return sampler is None or type(sampler) in _TORCHS


def global_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators."""
    return RandomStates(_CPU).capture()


def set_global_states(states: dict[str, Any]) -> None:
    """Set them to what `global_states` returned."""
    rng_state.apply(states, _CPU)


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

    def drawing(self, begin: Callable[[], Iterator[Item]], *, at_once: bool = False) -> Iterator[Item]:
        """The items of the iterator that `begin` returns, drawn from these generators; `at_once`: only the first."""
        with self._entered():
            items = begin()
            if at_once:
                items = itertools.chain([*itertools.islice(items, 1)], items)
        if at_once:
            yield from items
            return
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


def own_states(roots: dict[str, Any]) -> dict[str, Any]:
    """The states of the generators, counters and short lists reachable from `roots` (samplers), by path."""
    return {place: _state_of(_value(owner, name)) for place, owner, name in _places(roots)}


def set_own_states(roots: dict[str, Any], states: dict[str, Any]) -> None:
    """Set them to what `own_states` returned, of these objects or of others with the same structure."""
    for place, owner, name in [*_places(roots)]:
        if place in states:
            _set(owner, name, states[place])


def _places(roots: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The path of each generator and plain value, its owner, and its name there: an attribute, key or index."""
    seen: set[int] = set()

    def in_reach(place: str, owner: Any, name: Any, *, is_kept: bool) -> Iterator[tuple[str, Any, Any]]:
        value = _value(owner, name)
        if _is_generator(value) or (is_kept and _is_plain(value)):
            yield place, owner, name
            return
        names: dict[Any, bool] = {}
        if type(value) in (list, tuple, dict):
            if len(value) <= _ITEMS_MAX:
                names = dict.fromkeys(value, True) if type(value) is dict else dict.fromkeys(range(len(value)), False)
        elif _is_sampler(value):
            kept = _ATTRIBUTES.get(type(value), ()) if type(value) in _TORCHS else vars(value)
            names = {name: name in kept for name in vars(value)}
        if id(value) not in seen:
            seen.add(id(value))
            for each, keeps in names.items():
                yield from in_reach(f"{place}.{each}", value, each, is_kept=keeps)

    for name in roots:
        yield from in_reach(name, roots, name, is_kept=False)


def _is_sampler(value: Any) -> bool:
    """Whether it may be a sampler, or a part of one. A dataset is not, except an IterableDataset."""
    if not hasattr(value, "__dict__") or isinstance(value, Tensor | nn.Module | DataLoader | type):
        return False
    is_indexed = isinstance(value, Dataset) or hasattr(value, "__getitem__")
    # Lightning wraps a sampler in a dataset for DistributedSampler.
    is_wrapped = isinstance(getattr(value, "_sampler", None), Iterable)
    return is_wrapped or isinstance(value, IterableDataset) or (hasattr(type(value), "__iter__") and not is_indexed)


def _is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return (
            len(value) <= _LIST_MAX and {*map(type, value)} in (set(), {int}, {float}) and _array_of(value) is not None
        )
    if isinstance(value, Tensor) or (_is_array(value) and value.dtype.kind in "biuf"):
        return (value.numel() if isinstance(value, Tensor) else value.size) <= _NUMBERS_MAX
    return value is None or type(value) in (bool, int, float, str)


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
        version, numbers, gauss = value.getstate()
        return version, array("I", numbers).tobytes(), gauss
    if isinstance(value, Tensor):
        return value.clone()
    if _is_generator(value):
        bits = getattr(value, "bit_generator", value)
        value = value.get_state(legacy=False) if hasattr(value, "get_state") else bits.state
    return _stored(value)


def _set(owner: Any, name: Any, state: Any) -> None:
    value = _value(owner, name)
    if value is None and (made := _generator_for(state)):
        setattr(owner, name, value := made)
    if state is None or not _is_generator(value):
        _put(owner, name, value, _loaded(state))
    elif isinstance(value, torch.Generator):
        value.set_state(state.clone())
    elif isinstance(value, random.Random):
        version, numbers, gauss = state
        value.setstate((version, tuple(array("I", numbers)), gauss))
    elif hasattr(value, "set_state"):
        value.set_state(_loaded(state))
    else:
        bits: Any = getattr(value, "bit_generator", value)
        bits.state = _loaded(state)


def _generator_for(state: Any) -> Any:
    """A generator for a sampler that has not made its own yet, if it is the state of one."""
    if isinstance(state, Tensor) and state.dtype == torch.uint8 and state.shape == torch.get_rng_state().shape:
        return torch.Generator()
    is_pythons = isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], bytes)
    return random.Random() if is_pythons else None


def _put(owner: Any, name: Any, value: Any, kept: Any) -> None:
    """Set an attribute, or an item; in place if possible, since others may share the list."""
    if isinstance(value, list) and isinstance(kept, list):
        value[:] = kept
    elif isinstance(value, Tensor) and isinstance(kept, Tensor) and value.shape == kept.shape:
        value.copy_(kept)
    elif _is_array(value) and _is_array(kept) and value.size == kept.size:
        value[...] = kept.reshape(value.shape)
    else:
        kept = kept.clone() if isinstance(kept, Tensor) else tuple(kept) if isinstance(value, tuple) else kept
        if type(owner) is dict:
            owner[name] = kept
        else:
            setattr(owner, name, kept)


def _array_of(value: Any) -> array[Any] | None:
    try:
        return array("d" if value and type(value[0]) is float else "q", value)
    except (TypeError, OverflowError):
        return None


def _stored(value: Any) -> Any:
    """A copy with bytes for lists and arrays, since single numbers would cost time in each step."""
    if isinstance(value, dict):
        return {name: _stored(item) for name, item in value.items()}
    if isinstance(value, list | tuple) and (numbers := _array_of(value)) is not None:
        return {_BYTES: numbers.tobytes(), _TYPE: numbers.typecode}
    if not _is_array(value):
        return value
    return {_BYTES: value.tobytes(), _TYPE: value.dtype.str, _SHAPE: [*value.shape]}


def _loaded(value: Any) -> Any:
    """The inverse of `_stored`; a tuple becomes a list."""
    if not isinstance(value, dict):
        return value
    if _BYTES not in value:
        return {name: _loaded(item) for name, item in value.items()}
    if value[_TYPE] in ("d", "q"):
        return [*array(value[_TYPE], value[_BYTES])]
    return sys.modules["numpy"].frombuffer(value[_BYTES], value[_TYPE]).reshape(value[_SHAPE]).copy()


class Seeded(Dataset[Any]):
    """A map-style dataset whose own randomness (augmentation) is the same at any world size and after any restart.

    While a micro-batch of `Order.batches` is read, `random`, numpy's global generator (if numpy is imported) and
    torch's CPU generator are seeded with the micro-batch's key. Afterwards their states are restored.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, ids: list[int]) -> list[Any]:
        """DataLoader calls this with the ids of one batch."""
        if not isinstance(ids, Samples):
            raise TypeError("Seeded needs the keys of Order.batches(); give them to DataLoader as batch_sampler")
        before = global_states()
        seed(ids.key)
        try:
            if hasattr(self._dataset, "__getitems__"):
                return cast("list[Any]", self._dataset.__getitems__(ids))
            return [self._dataset[index] for index in ids]
        finally:
            set_global_states(before)


def seed(key: int) -> None:
    """Seed `random`, numpy's global generator (if numpy is imported) and torch's CPU generator."""
    random.seed(key)
    torch.default_generator.manual_seed(key)
    if numpy := sys.modules.get("numpy"):
        # numpy takes 32-bit seeds.
        numpy.random.seed([key & 0xFFFFFFFF, key >> 32])


def accumulate(
    model: nn.Module, order: Order, step: int, rank: int | None = None, world_size: int | None = None
) -> Iterator[Micro]:
    """This rank's micro-batches of `step`, one after the other, for forward and backward of each in the loop's body:

        for micro in accumulate(model, order, step):
            (loss(model(inputs), targets) * micro.weight).backward()

    `loss` must be a mean over the micro-batch's samples. torch's generators on CPU and CUDA are seeded with the
    micro-batch's key, so dropout masks do not depend on the world size. Only the last backward sums gradients over the
    ranks: it uses `no_sync()` of DDP and FSDP, or `set_requires_gradient_sync` of FSDP2. `rank` and `world_size`
    default to those of the process group; without a group the process is alone. Raises ValueError if the ranks of FSDP
    would run different numbers of forward passes, since they would wait for each other forever.
    """
    if rank is None or world_size is None:
        grouped = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    if _is_sharded(model) and not order.even and order.micro_batches % world_size:
        raise ValueError(
            f"{world_size} workers cannot share {order.micro_batches} micro-batches evenly, and each forward pass of "
            "FSDP needs all of them; give Order even=True"
        )
    for micro in order.parts(step, rank, world_size):
        torch.manual_seed(micro.key)
        with contextlib.nullcontext() if micro.is_last else _without_sync(model):
            yield micro


@contextlib.contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            yield


def _is_sharded(model: nn.Module) -> bool:
    # FSDP2's modules have the method. FSDP1 is recognised by name, since importing it would take long.
    return hasattr(model, "set_requires_gradient_sync") or type(model).__name__ == "FullyShardedDataParallel"
