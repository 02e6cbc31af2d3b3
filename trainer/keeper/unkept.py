"""Finds objects of the program that change with its training, and that no Keeper has."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from elaunch.trainer.data.order import BatchSampler
from elaunch.trainer.keeper.values import generator_state, variables
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import local_parts, tensors_in

# How far the program's objects are followed. What is larger is data.
NODES_MAX, _ITEMS_MAX, _PATH_MAX, _AVERAGED_MAX = 20_000, 1_000, 1_000, 64
# An average of weights is so near to them, as a part of their norm; so many values are looked at.
_NEAR, _SAMPLE = 0.3, 64
_LEAVES = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)
_LOOKED_FOR = (DataLoader, LRScheduler, torch.amp.GradScaler)

_LOADER = (
    "a DataLoader of this program shuffles, and its position is not kept: after a restart it starts over, and samples "
    "are repeated or skipped. Wrap it: batches = elaunch.trainer.Batches(loader), pass per_rank=batches, and call "
    "next(batches) in the loop. If the order needs no state, pass per_rank=()"
)
_NOT_GIVEN = "the program's {} is not kept: a restart resets it. Pass it to the Keeper ({}=…), and {} in the commit"
_SCHEDULE = (
    "the program's {} counts the steps of a learning rate, and is not kept: a restart resets it. Pass it to the Keeper "
    "(scheduler=…) with state_dict and load_state_dict, or compute the rate from the number of the step"
)
_OPTIMIZER = (
    "the program's {} steps, and is not kept: a restart resets it and its parameters. Pass all of them: "
    "Keeper([model, other], [optimizer, its_optimizer])"
)
_FOLLOWS = (
    "`{}` follows the weights, and is not kept: a restart resets it. Pass it to the Keeper (extra=…), and update it in "
    "the commit. A copy that is made before each use needs nothing"
)
_GENERATOR = (
    "the program draws from the generator `{}`, which is not kept: a restart resets it, and the run differs from one "
    "without a failure. Pass it to the Keeper (per_rank={}), or draw from the global generators, which are kept"
)
# Those of this process's Keepers.
_all: weakref.WeakSet[Unkept] = weakref.WeakSet()


class Unkept:
    """What one training has beside `kept`, the Keeper's arguments by name.

    `tell(kind, sentence)` warns once of each kind; `options` returns the present options of the optimizers.
    """

    def __init__(
        self,
        training: Training,
        kept: Mapping[str, Any],
        tell: Callable[[str, str], None],
        options: Callable[[], list[Any]],
    ) -> None:
        self._training, self._kept, self._tell, self._options = training, kept, tell, options
        self._movers: list[tuple[str, str, Callable[[], Any], Any]] = []
        # Tensors that are like the weights, by path, each with a few values.
        self._averages: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._weights: list[Tensor] = []
        _all.add(self)

    def note_weights(self) -> None:
        """For `compare` after the next commit: a copy of the weights that it makes for itself is no average of them."""
        self._weights = [one for its in self._samples().values() for one in its]

    def _samples(self) -> dict[torch.Size, list[Tensor]]:
        """A few values of each of the first weights of each shape."""
        found: dict[torch.Size, list[Tensor]] = {}
        for weight in self._training.model.parameters():
            if weight.requires_grad and len(found.setdefault(weight.shape, [])) < _AVERAGED_MAX:
                found[weight.shape].append(_sample(weight))
        return found

    def compare(self) -> None:
        """Warn of what `note_variables` has noted and the steps since then have changed."""
        for kind, sentence, read, before in self._movers:
            with contextlib.suppress(Exception):
                if read() not in (None, before):
                    self._tell(kind, sentence)
        gone = {path: sample for path, (one, sample) in self._averages.items() if one() is None}
        for path, (ref, sample) in self._averages.items():
            if (one := ref()) is not None and not _is_equal(_sample(one), sample):
                self._tell_of_average(path)
        # Others may have been made in their places.
        weights = [*self._weights, *(one for its in self._samples().values() for one in its)] if gone else []
        for path, one in _of_program(_kept_by_all()[0]) if gone else ():
            known = [gone[path], *weights] if path in gone and is_a(one, Tensor) else None
            if known and not any(_is_equal(_sample(one), each) for each in known):
                self._tell_of_average(path)
        self._movers, self._averages = [], {}

    def _tell_of_average(self, path: str) -> None:
        name = path.partition(".")[0]
        self._tell(f"average {name}", _FOLLOWS.format(name))

    def look_through(self) -> None:
        """Name the loaders, schedulers and scalers of this training that no Keeper has."""
        objects = gc.get_objects()
        # By type: isinstance would load lazy objects.
        kinds = {each for each in set(map(type, objects)) if issubclass(each, _LOOKED_FOR) or _is_schedule(each)}
        things, _ = _kept_by_all()
        for one in [one for one in objects if type(one) in kinds and id(one) not in things]:
            name = type(one).__name__
            if type(one) is DataLoader:
                if self._kept["per_rank"] is None and _shuffles(one):
                    self._tell("loader", _LOADER)
            elif isinstance(one, torch.amp.GradScaler):
                if one.is_enabled():
                    self._tell("scaler", _NOT_GIVEN.format(name, "scaler", "call its update()"))
            elif any(getattr(one, "__dict__", {}).get("optimizer") is each for each in self._training.optimizers):
                self._tell(f"scheduler {name}", _NOT_GIVEN.format(name, "scheduler", "call its step()"))

    def _note(self, kind: str, sentence: str, read: Callable[[], Any]) -> None:
        """Warn with `sentence` if the value of `read` changes in the next steps. None: the object is gone."""
        # A SystemRandom has no state.
        with contextlib.suppress(Exception):
            self._movers.append((kind, sentence, read, read()))

    def note_variables(self) -> None:
        """Note optimizers, generators, and tensors that are like the weights, that the program's variables lead to."""
        things, memory = _kept_by_all()
        ours = {id(each) for one in self._training.optimizers for each in (one, getattr(one, "param_groups", one))}
        likes = self._samples()
        for path, one in _of_program(things):
            name = type(one).__name__
            # Another one may be a library's, around ours.
            if is_a(one, Optimizer) and not ours & {id(one.param_groups), *map(id, vars(one).values())}:
                self._note(f"optimizer {name}", _OPTIMIZER.format(name), partial(_steps, one, memory))
            elif (read := _draws(one)) is not None:
                its = f"[…, {path}]" if is_a(one, torch.Generator) else "an object with its state_dict"
                self._note(f"generator {path}", _GENERATOR.format(path, its), read)
            elif (
                len(self._averages) < _AVERAGED_MAX
                and is_a(one, Tensor)
                and memory_of(one) not in memory
                and any(_is_near(sample := _sample(one), like) for like in likes.get(one.shape, ()))
            ):
                memory.add(memory_of(one))
                self._averages[path] = weakref.ref(one), sample
            elif self._kept["scheduler"] is None and (held := self._schedule(one)) is not None:
                name, before = type(one).__name__, (self._options(), _counters(held))
                self._note(f"scheduler {name}", _SCHEDULE.format(name), partial(self._counted, held, *before))

    def _schedule(self, one: Any) -> dict[str, Any] | None:
        """The attributes of an object that has an optimizer of the Keeper; None if it also has a model, or others."""
        try:
            its = object.__getattribute__(one, "__dict__")
        except AttributeError:
            return None
        if type(one).__module__.startswith("elaunch."):
            return None
        has_ours = any(value is each for value in its.values() for each in self._training.optimizers)
        return its if has_ours and not any(is_a(value, nn.Module) for value in its.values()) else None

    def _counted(self, its: dict[str, Any], options: list[Any], counters: list[float]) -> list[float] | None:
        """The numbers of such an object if they and the options of the optimizers have changed; else None."""
        now = _counters(its)
        return now if now != counters and self._options() != options else None


def _of_program(without: Collection[int]) -> Iterator[tuple[str, Any]]:
    """What the variables of the program lead to. A tensor that is one comes last: it may be a loop's, of an average."""
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


def _draws(one: Any) -> Callable[[], Any] | None:
    """A function that returns the present state of a generator; None for another object, and for a global one."""
    numpys = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    if one is torch.default_generator or one is numpys or generator_state(one) is None:
        return None
    if not is_a(one, torch.Generator):
        return partial(generator_state, one)
    seed = one.initial_seed()
    # One that each step seeds needs no state.
    return lambda: one.get_state().tolist() if one.initial_seed() == seed else None


def _steps(optimizer: Optimizer, memory: set[int]) -> Any:
    """Version counters of an optimizer's state, and of those of its parameters that no Keeper has."""
    own = [p for group in optimizer.param_groups for p in group["params"] if memory_of(p) not in memory]
    states = [*tensors_in([*optimizer.state.values()])]
    return len(states), sum(each._version for each in [*states, *own])


def _counters(its: dict[str, Any]) -> list[float]:
    return [value for value in its.values() if is_a(value, int, float)]


def _sample(tensor: Tensor) -> Tensor:
    """A few values from its middle; none where they are not floating-point numbers side by side."""
    part = local_parts(tensor)[0]
    is_plain = part.is_floating_point() and part.layout == torch.strided and part.device.type != "meta"
    if not (is_plain and part.is_contiguous() and part.untyped_storage().nbytes()):
        return torch.empty(0)
    begin = (part.numel() - _SAMPLE) // 2
    return part.flatten()[max(0, begin) :][:_SAMPLE].float().cpu().clone()


def _is_equal(sample: Tensor, other: Tensor) -> bool:
    return sample.shape == other.shape and torch.equal(sample, other)


def _is_near(sample: Tensor, like: Tensor) -> bool:
    is_alike = sample.shape == like.shape and bool((sample - like).norm() <= _NEAR * like.norm())
    return is_alike and bool(like.any())


def _is_schedule(kind: type) -> bool:
    """Whether it looks like a library's own scheduler."""
    return "schedul" in kind.__name__.lower() and hasattr(kind, "step")


def _shuffles(loader: Any) -> bool:
    """A loader that does not shuffle is taken for one that evaluates. One with `Order.batches` needs nothing."""
    sampler = loader.sampler
    shuffles = isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
    return shuffles and not isinstance(loader.batch_sampler, BatchSampler)


def is_a(value: object, *kinds: type) -> bool:
    """`isinstance`, without asking a lazy object for its class."""
    return issubclass(type(value), kinds)


def memory_of(tensor: Tensor) -> int:
    part = local_parts(tensor)[0]
    return part.data_ptr() if part.layout == torch.strided and part.device.type != "meta" else id(tensor)
