"""Finds objects of the program that change with its training and that no Keeper has; digests values."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import chain, islice
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elaunch.trainer.data.order import BatchSampler
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import digests, equal, local_parts, tensors_sha256

# Limits of the search through the program's objects and variables. Larger ones are data.
NODES_MAX, _ITEMS_MAX, _PATH_MAX, _AVERAGED_MAX = 20_000, 1_000, 1_000, 64
_DEPTH, _BYTES_MAX = 6, 1 << 26
_SHOWN_CHARS, _HASHED_BYTES_MAX = 40, 1 << 20
# The largest distance of an average from the weights, relative to their norm, and the number of compared values.
_NEAR, _SAMPLE = 0.3, 64
_LEAVES = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)
_SEARCHED = (DataLoader, _BaseDataLoaderIter, LRScheduler, torch.amp.GradScaler)

_LOADER = (
    "the position of a DataLoader of this program is not kept: after a restart it starts over, and samples are "
    "repeated or skipped. Wrap it: batches = elaunch.trainer.Batches(loader), pass per_rank=batches, and call "
    "next(batches) in the loop. If the order needs no state, pass per_rank=()"
)
_NOT_GIVEN = "the program's {} is not kept: a restart resets it. Pass it to the Keeper ({}=…), and {} in the commit"
_SCHEDULE = (
    "the program's {} counts the steps of a learning rate, and is not kept: a restart resets it. Pass it to the Keeper "
    "(scheduler=…) with state_dict and load_state_dict, or compute the rate from the number of the step"
)
_OPTIMIZER = (
    "the program's {} steps, and is not kept: a restart resets it and its parameters. Pass all of them: "
    "Keeper([model, other], [optimizer, its_optimizer]). In place of a new one, change the options of the "
    "old one (param_groups), or enter a new Keeper with it, under a name= of its own"
)
_FOLLOWS = (
    "`{}` follows the weights, and is not kept: a restart resets it. Pass it to the Keeper (extra=…), and update it in "
    "the commit. A copy that is made before each use needs nothing"
)
_GENERATOR = (
    "the program draws from the generator `{}`, which is not kept: a restart resets it, and the run differs from one "
    "without a failure. Pass it to the Keeper (per_rank={}), or draw from the global generators, which are kept"
)
# The instances of this process's Keepers.
_all: weakref.WeakSet[Unkept] = weakref.WeakSet()


@dataclass(frozen=True)
class _Candidate:
    """A generator, a schedule or a tensor near the weights, which a warning of `kind` would name.

    It counts as state if all `values` have changed when it is seen again. `one` is None for a tensor.
    """

    kind: str
    sentence: str
    values: tuple[Any, ...]
    one: Any = None


class Unkept:
    """What one training has outside `kept`, the Keeper's arguments by name.

    `warn(kind, sentence)` warns once of each kind; `options` returns the present options of the optimizers.
    """

    def __init__(
        self,
        training: Training,
        kept: Mapping[str, Any],
        warn: Callable[[str, str], None],
        options: Callable[[], dict[str, Any]],
    ) -> None:
        self._training, self._kept, self._warn, self._options = training, kept, warn, options
        # By path and identity; and a few values of the weights before the current commit.
        self._noted: dict[tuple[object, ...], _Candidate] = {}
        self._weights: list[Tensor] = []
        _all.add(self)

    def watch_optimizers(self, stack: ExitStack, step: Callable[[], int]) -> None:
        """Until `stack` is left, warn of an optimizer that no Keeper has and that is used in two steps."""
        first: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

        def stepped(one: Optimizer, args: object, kwargs: object) -> None:
            now = step()
            if 0 <= first.setdefault(one, now) < now:
                # Checked once per optimizer.
                first[one] = -1
                if not self._is_kept(one):
                    name = type(one).__name__
                    self._warn(f"optimizer {name}", _OPTIMIZER.format(name))

        stack.callback(register_optimizer_step_post_hook(stepped).remove)

    def _is_kept(self, one: Optimizer) -> bool:
        ours = {id(each) for its in self._training.optimizers for each in (its, getattr(its, "param_groups", its))}
        # A library's optimizer may wrap ours.
        return bool(ours & {id(one.param_groups), *map(id, vars(one).values())}) or id(one) in _kept_by_all()[0]

    def note_weights(self) -> None:
        """Sample the weights for `compare` after the next commit: a plain copy of them is not an average."""
        self._weights = [one for its in self._samples().values() for one in its]

    def _samples(self) -> dict[torch.Size, list[Tensor]]:
        """A few values of each of the first weights of each shape."""
        found: dict[torch.Size, list[Tensor]] = {}
        for weight in self._training.model.parameters():
            if weight.requires_grad and len(found.setdefault(weight.shape, [])) < _AVERAGED_MAX:
                found[weight.shape].append(_sample(weight))
        return found

    def compare(self) -> None:
        """Warn of objects reachable from the program's variables that have changed since the last call."""
        likes = self._samples()
        before, self._noted = self._noted, dict(self._seen(likes))
        weights = [*self._weights, *(one for its in likes.values() for one in its)]
        for key, now in self._noted.items():
            has_changed = key in before and not any(map(equal, now.values, before[key].values))
            if has_changed and (now.one is not None or not any(equal(now.values[0], each) for each in weights)):
                self._warn(now.kind, now.sentence)

    def _seen(self, likes: Mapping[torch.Size, list[Tensor]]) -> Iterator[tuple[tuple[object, ...], _Candidate]]:
        things, memory = _kept_by_all()
        averages = 0
        for path, one in _of_program(things):
            name, root = type(one).__name__, path.partition(".")[0]
            if is_a(one, Tensor):
                sample = _sample(one) if averages < _AVERAGED_MAX and memory_of(one) not in memory else None
                if sample is not None and any(_is_near(sample, like) for like in likes.get(one.shape, ())):
                    averages += 1
                    memory.add(memory_of(one))
                    yield (path,), _Candidate(f"average {root}", _FOLLOWS.format(root), (sample,))
            elif (state := _drawn(one)) is not None:
                its = f"[…, {path}]" if is_a(one, torch.Generator) else "an object with its state_dict"
                # One that each step seeds needs no state.
                key = path, id(one), one.initial_seed() if is_a(one, torch.Generator) else 0
                yield key, _Candidate(f"generator {path}", _GENERATOR.format(path, its), (state,), one)
            elif self._kept["scheduler"] is None and (held := self._schedule(one)) is not None:
                counters = [value for value in held.values() if is_a(value, int, float)]
                seen = _Candidate(f"scheduler {name}", _SCHEDULE.format(name), (counters, self._options()), one)
                yield (path, id(one)), seen

    def _schedule(self, one: Any) -> dict[str, Any] | None:
        """The attributes of an object that has an optimizer of the Keeper and no model; None for others."""
        try:
            its = object.__getattribute__(one, "__dict__")
        except AttributeError:
            return None
        is_elaunchs = type(one).__module__.startswith("elaunch.")
        has_ours = any(value is each for value in its.values() for each in self._training.optimizers)
        return its if has_ours and not (is_elaunchs or any(is_a(each, nn.Module) for each in its.values())) else None

    def scan(self) -> None:
        """Warn of the loaders, schedulers and scalers of this training that no Keeper has."""
        objects = gc.get_objects()
        # By type: isinstance would load lazy objects.
        kinds = {each for each in set(map(type, objects)) if issubclass(each, _SEARCHED)}
        things, _ = _kept_by_all()
        # A loader that does not shuffle is taken for one that evaluates, unless there is no other.
        has_one = sum(kind is DataLoader for kind in map(type, objects)) == 1
        for one in [one for one in objects if type(one) in kinds and id(one) not in things]:
            name = type(one).__name__
            if type(one) is DataLoader:
                its = one.sampler
                shuffles = isinstance(its, RandomSampler) or (isinstance(its, DistributedSampler) and its.shuffle)
                # A loader with `Order.batches` needs nothing.
                has_order = isinstance(one.batch_sampler, BatchSampler)
                if self._kept["per_rank"] is None and not has_order and (has_one or shuffles):
                    self._warn("loader", _LOADER)
            elif isinstance(one, _BaseDataLoaderIter):
                # itertools.cycle(DataLoader(…)) holds only the iterator.
                if self._kept["per_rank"] is None and not isinstance(one._index_sampler, BatchSampler):
                    self._warn("loader", _LOADER)
            elif isinstance(one, torch.amp.GradScaler):
                if one.is_enabled():
                    self._warn("scaler", _NOT_GIVEN.format(name, "scaler", "call its update()"))
            elif any(getattr(one, "__dict__", {}).get("optimizer") is each for each in self._training.optimizers):
                self._warn(f"scheduler {name}", _NOT_GIVEN.format(name, "scheduler", "call its step()"))


def _of_program(without: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Objects reachable from the program's variables; tensors last: a loop variable may be a part of an average."""
    held = dict(variables(sys._getframe(1)))
    alone = {name: one for name, one in held.items() if is_a(one, Tensor)}
    inside = {name: one for name, one in held.items() if name not in alone}
    return chain(*(reach("", its, NODES_MAX, without) for its in (inside, alone)))


def reach(path: str, value: Any, left: int = NODES_MAX, without: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """All objects reachable from `value`, with their paths, breadth first, but not through those in `without`."""
    seen, queue = set(without), deque([(path, value)])
    while queue and left:
        path, value = queue.popleft()
        if len(path) > _PATH_MAX or id(value) in seen or is_a(value, *_LEAVES):
            continue
        seen.add(id(value))
        left -= 1
        yield path, value
        items: Any = ()
        if is_a(value, dict):
            items = value.items()
        elif is_a(value, list, tuple, set, frozenset):
            items = enumerate(value)
        elif not is_a(value, Tensor) and not (
            without and (is_a(value, DataLoader, Sampler) or type(value).__module__.startswith("elaunch."))
        ):
            with contextlib.suppress(Exception):
                items = object.__getattribute__(value, "__dict__").items()
        for key, item in list(islice(items, None if left > NODES_MAX else _ITEMS_MAX)):
            queue.append((f"{path}.{key if is_a(key, str, int) else '…'}".lstrip("."), item))


def _kept_by_all() -> tuple[set[int], set[int]]:
    """The objects, and the memory of the tensors, that the Keepers of this process keep."""
    things, memory = set[int](), set[int]()
    for unkept in _all:
        live = unkept._training.live_tensors.named()
        tensors = [*(one for _, one in live), *unkept._training.model.buffers()]
        for _, one in reach("", unkept._kept):
            things.add(id(one))
            tensors += [one] if is_a(one, Tensor) else []
        memory |= set(map(memory_of, tensors))
    return things, memory


def _drawn(one: Any) -> Any:
    """The present state of a generator; None for another object, and for a global one."""
    numpys = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    return None if one is torch.default_generator or one is numpys else generator_state(one)


def _sample(tensor: Tensor) -> Tensor:
    """A few values from its middle; none unless it is floating-point and contiguous."""
    part = local_parts(tensor)[0]
    is_plain = part.is_floating_point() and part.layout == torch.strided and part.device.type != "meta"
    if not (is_plain and part.is_contiguous() and part.untyped_storage().nbytes()):
        return torch.empty(0)
    begin = (part.numel() - _SAMPLE) // 2
    return part.flatten()[max(0, begin) :][:_SAMPLE].float().cpu().clone()


def _is_near(sample: Tensor, like: Tensor) -> bool:
    is_alike = sample.shape == like.shape and bool((sample - like).norm() <= _NEAR * like.norm())
    return is_alike and bool(like.any())


def is_a(value: object, *kinds: type) -> bool:
    """`isinstance`, without `__class__`, which would load a lazy object."""
    return issubclass(type(value), kinds)


def memory_of(tensor: Tensor) -> int:
    part = local_parts(tensor)[0]
    return part.data_ptr() if part.layout == torch.strided and part.device.type != "meta" else id(tensor)


def variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the program's functions on the call stack, by name."""
    while frame is not None:
        module, path = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        if (
            not module.startswith("elaunch.")
            and "site-packages" not in path
            and not path.startswith(("<", sys.base_prefix))
        ):
            held = frame.f_locals
            found = [(name, value) for name, value in [*held.items()] if name[:2] != "__"]
            if type(held) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
                # Before Python 3.13 a function's frame keeps this copy of its variables, and so this step's tensors.
                for name in [name for name, value in found if _has_tensors(value)]:
                    del held[name]
            yield from found
            del held, found
        frame = frame.f_back


def _has_tensors(value: object) -> bool:
    several: Any = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    return any(issubclass(type(each), Tensor) for each in several)


def named(path: str, value: Any, kept: frozenset[int] | None = None, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Tensors, generators and plain values in `value` by their paths; with `kept` also in objects not in `kept`."""
    if isinstance(value, Tensor):
        if kept is None or value.nbytes < _BYTES_MAX:
            yield path, value
    elif (state := generator_state(value)) is not None:
        yield f"generator `{path}`", state
    elif isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, value)))
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield path, repr(value)
    elif depth and not type(value).__module__.startswith("elaunch.") and id(value) not in (kept or ()):
        items: Any = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list | tuple):
            items = enumerate(value)
        elif kept is not None and not isinstance(value, dict | ModuleType | FunctionType | type):
            # An attribute that has not changed may be that of the class. One is Python's own, from 3.13 on.
            numbers = {name: its for name, its in vars(type(value)).items() if isinstance(its, int | float)}
            numbers.pop("__firstlineno__", None)
            own = value.state_dict() if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
            items = (numbers | own).items()
        for key, item in islice(items, _ITEMS_MAX):
            yield from named(f"{path}.{key}".lstrip("."), item, kept, depth - 1)


def generator_state(value: Any) -> Tensor | str | None:
    """The present state of a generator of torch, numpy or Python; None for another object."""
    if type(value).__module__.partition(".")[0] not in ("torch", "numpy", "random"):
        return None
    get = getattr(value, "get_state", None) or getattr(value, "getstate", None)
    if not get and not hasattr(value, "bit_generator"):
        return None
    try:
        state = get() if get else value.bit_generator.state
    except NotImplementedError:
        # random.SystemRandom has none.
        return None
    return state if isinstance(state, Tensor) else repr(state)


def digest(value: Any) -> str:
    """What is compared of a value: itself, or its digest if it is long."""
    if isinstance(value, Tensor):
        return "; ".join(f"{str(part.dtype)[6:]}{[*part.shape]} {_bits(part)}" for part in local_parts(value))
    return value if len(value) <= _SHOWN_CHARS else "… " + hashlib.sha256(value.encode()).hexdigest()[:16]


def _bits(part: Tensor) -> str:
    # A sum is fast, but a generator that counts one number up and another one down keeps its sum.
    return f"{digests({'': part})['']:x}" if part.nbytes > _HASHED_BYTES_MAX else tensors_sha256([part])[:16]
