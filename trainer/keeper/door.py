"""The door: asks at entry, at the first commits and after a restore what of this program the Keeper does not keep."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from elaunch.trainer import link
from elaunch.trainer.data.order import BatchSampler
from elaunch.trainer.keeper.rehearsal import variables
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.digests import digests
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State, equal, is_shard, local_parts, some, tensors_sha256

# After the first of these commits the program's objects are noted, and after the other one compared.
_NOTED_AT, _COMPARED_AT = 1, 4
# At so many looks of a job the ranks compare once more what they must have alike.
_LOOKS = 3
# How far the program's objects are followed. What is larger is data.
_NODES_MAX, _ITEMS_MAX, _LEAVES_MAX, _AVERAGED_MAX = 50_000, 1_000, 10_000, 64
# An average of weights is so near to them, as a part of their norm; so many values are looked at.
_NEAR, _SAMPLE, _HASHED_BYTES_MAX = 0.3, 64, 1 << 20
_AVERAGE_NAME = re.compile(r"(?<![A-Z])EMA(?![A-Z])|Ema(?![a-z])|MovingAverage")
# The options that a schedule changes.
_NUMBERS = ("lr", "momentum", "betas", "weight_decay")

_LOADER = (
    "a DataLoader of this program shuffles, and its position is not kept: after a restart it begins anew, and "
    "samples come twice or never. One line ends that: batches = elaunch.trainer.Batches(loader), given as "
    "per_rank=batches; the loop takes next(batches). per_rank=() says that the order needs nothing"
)
_NOT_GIVEN = "the program's {} is not kept: a restart begins it again. Give it: Keeper(…, {}=…), and {} in the commit"
_SCHEDULE = (
    "the program's {} counts the steps of a learning rate, and is not kept: a restart begins it again. Give it: "
    "Keeper(…, scheduler=…), with state_dict and load_state_dict, or compute the rate from the number of the step"
)
_OPTIMIZER = (
    "the program's {} steps, and is not kept: a restart begins it and its parameters again. Give all of them: "
    "Keeper([model, other], [optimizer, its_optimizer])"
)
_FOLLOWS = (
    "`{}` follows the weights, and is not kept: a restart begins it again. Give it: Keeper(…, extra=…), and change it "
    "in the commit"
)
_GENERATOR = (
    "the generator `{}` draws in the steps, and is not kept: a restart begins it again, and draws other numbers than a "
    "run without a failure. Give it: Keeper(…, per_rank={}), or draw from the global generators, which are kept"
)
# Those of this process's Keepers.
_doors: weakref.WeakSet[Door] = weakref.WeakSet()


class Door:
    """The questions about one training. `kept` are the Keeper's arguments by name.

    `path` lists the sentences that the job has had, in the node's memory; None without one. `is_first` is for a job's
    first generation. With `is_others` the loop is a library's: what it puts into `extra` and where it sets options is
    its own.
    """

    def __init__(
        self,
        training: Training,
        kept: Mapping[str, Any],
        peers: Peers,
        path: Path | None,
        *,
        say: Callable[[str], object],
        is_first: bool,
        is_others: bool,
    ) -> None:
        self._training, self._kept, self._peers, self._path = training, kept, peers, path
        self._say, self._is_first, self.is_others = say, is_first, is_others
        self._said = set(path.read_text().split("\n")) if path is not None and path.exists() else set[str]()
        self._schedulers = [one for one in _several(kept["scheduler"]) if isinstance(one, LRScheduler)]
        self._options: list[Any] = []
        self._counts: list[Any] = []
        self._movers: list[tuple[str, str, Callable[[], Any], Any]] = []
        self._commits = self._looks = 0
        # The number of commits at the last evaluation.
        self._evaluated = -1
        # What this rank drew for a step before a failure, until it has drawn the same for it.
        self._expected: tuple[int, State] = (0, {})

    def enter(self, step: int, before: tuple[int, State]) -> None:
        """The state of `step` is restored. `before` is what an earlier process drew for a step. Collective.

        Raises ValueError if something would be wrong after a failure for sure.
        """
        _doors.add(self)
        _refuse(self._strange_parameters())
        # A restore makes all ranks alike.
        found = "" if step else self._difference()
        _refuse(found and f"{found}. {_way_out(found)}")
        if before[0] == step + 1:
            self._expected = before
        if self._is_first and self._peers.leads:
            # The program's objects may do anything when they are asked, and none of that may end the training.
            with contextlib.suppress(Exception):
                self._look_through()

    def commit_begins(self, step: int) -> None:
        """Name a scheduler that was stepped since the last commit."""
        for one, before in zip(self._schedulers, self._counts, strict=False):
            if _count(one) != before:
                self._tell(
                    "scheduler.step",
                    f"{type(one).__name__}.step() was called outside keeper.commit() after step {step - 1}: after a "
                    "failure there that call is lost, or made twice, and the learning rate is another from then on. "
                    "Call it in the commit",
                )

    def committed(self, step: int) -> None:
        """The commit of `step` has ended."""
        self._commits += 1
        self._options, self._counts = self._numbers(), list(map(_count, self._schedulers))
        if step == self._expected[0] and not self.is_others:
            self._tell(
                "drawn",
                f"rank {self._peers.rank} drew other random numbers, or got another batch, in step {step} than before "
                "the failure: something that the Keeper does not keep decides that, and `elaunch rehearse` names it",
                by_all=True,
            )
        if self._is_first and self._peers.leads and self._commits == _NOTED_AT:
            with contextlib.suppress(Exception):
                self._note_variables()
        elif self._commits == _COMPARED_AT:
            for kind, sentence, read, before in self._movers:
                if read() not in (None, before):
                    self._tell(kind, sentence)
            self._movers = []

    def step_begins(self, step: int) -> None:
        """Name options that have changed since the commit of `step`. What the next step sets is set again."""
        if self._evaluated == self._commits:
            self._look_at_weights()
        for group, (old, now) in enumerate(zip(self._options, self._numbers(), strict=False)):
            for name, *values in zip(_NUMBERS, old, now, strict=True):
                if values[0] != values[1]:
                    self._tell(
                        "options",
                        f"`{name}` of the optimizer's group {group} changed outside keeper.commit() after step {step} "
                        f"(from {values[0]!s:.40} to {values[1]!s:.40}): after a failure there it is the old one. "
                        "Change it in the commit, or when a step begins",
                    )

    def drawn(self, step: int, own: Callable[[], State]) -> None:
        """A backward pass of `step` begins, and `own` returns what this rank has drawn and fetched for it."""
        if step == self._expected[0] and self._are_alike(self._expected[1], own()):
            self._expected = (0, {})

    def _are_alike(self, one: State, other: State) -> bool:
        """Whether a rank has drawn and fetched the same, as far as nothing else counts there."""
        if not equal(one["random"], other["random"]):
            return False
        if self._training.per_rank is None or "per_rank" not in one:
            return True
        pairs = zip(self._training.per_rank.kinds, one["per_rank"]["states"], other["per_rank"]["states"], strict=True)
        return all(equal(its, now) for kind, its, now in pairs if kind in ("Batches", "GeneratorState"))

    def watch_evaluations(self, stack: contextlib.ExitStack, look: Callable[[], None]) -> None:
        """Until `stack` is left, `look` at the weights when an evaluation begins, and when the next step does."""
        self._look_at_weights = look

        def before_forward(module: nn.Module, _: object) -> None:
            if not module.training and self._evaluated != self._commits:
                self._evaluated = self._commits
                look()

        for model in self._training.models:
            # A program may evaluate what is in DDP's wrapper; hooks of a compiled module would be compiled too.
            inner = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
            if getattr(inner, "_compiled_call_impl", None) is None:
                stack.callback(inner.register_forward_pre_hook(before_forward).remove)

    def look(self, step: int) -> None:
        """After a job's first steps, compare once more what all ranks must have alike. Collective."""
        if self._is_first and self._commits and self._looks < _LOOKS:
            self._looks += 1
            if found := self._difference():
                self._tell("ranks", f"{found} after step {step}. {_way_out(found)}")

    def _tell(self, kind: str, sentence: str, *, by_all: bool = False) -> None:
        """Say it once in the job. The ranks run one program, so one of them is enough."""
        if kind in self._said or not (by_all or self._peers.leads):
            return
        self._said.add(kind)
        if self._path is not None:
            # Without room for so little the sentence comes again.
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(f"{kind}\n")
        self._say(sentence)

    def _numbers(self) -> list[Any]:
        """The options of all groups that schedules change; none if a library sets them."""
        its = () if self.is_others else self._training.optimizers
        groups = [group for one in its for group in getattr(one, "param_groups", ())]
        return [tuple(_number(group.get(name)) for name in _NUMBERS) for group in groups]

    def _difference(self) -> str:
        """What differs between two ranks; "" if nothing does. Collective."""
        if self._peers.world_size == 1:
            return ""
        own = dict(self._alike())
        if len(set(self._peers.from_all(crc32(repr(sorted(own.items())).encode())))) == 1:
            return ""
        found = self._peers.from_all(own)
        rank = next(number for number, its in enumerate(found) if its != found[0])
        names = [name for name in {**found[0], **found[rank]} if found[0].get(name) != found[rank].get(name)]
        return f"{some([f'`{name}`' for name in names])} of rank {rank} differs from rank 0's"

    def _alike(self) -> Iterator[tuple[str, int]]:
        """A digest of each part that a failure would make alike; after the first commit only of what changes."""
        training, is_later = self._training, bool(self._commits)
        weights = () if training.is_in_parts else training.model.named_parameters()
        named = {name: weight.detach() for name, weight in weights if weight.requires_grad or not is_later}
        for name, number in digests(named).items():
            yield name, number ^ crc32(repr((named[name].shape, named[name].dtype)).encode())
        for number, one in enumerate(training.optimizers):
            groups = [{k: v for k, v in its.items() if k[:5] != "param"} for its in getattr(one, "param_groups", ())]
            yield from _leaves(f"optimizer {number}.param_groups" if number else "optimizer.param_groups", groups)
        for name in ("scheduler", "scaler") if self.is_others else ("scheduler", "scaler", "extra"):
            parts = _several(self._kept[name])
            for number, part in enumerate(parts):
                # Objects may record times.
                if not is_later or name != "extra" or _is(part, dict, list, Tensor):
                    state = part.state_dict() if hasattr(part, "state_dict") else part
                    yield from islice(_leaves(f"{name}[{number}]" if len(parts) > 1 else name, state), _LEAVES_MAX)

    def _strange_parameters(self) -> str:
        """A sentence about an optimizer's parameters that the Keeper does not have; "" if there are none."""
        known = {_memory(one) for _, one in self._training.live_tensors.named(optimizers=False)}
        for one in () if self._training.is_in_parts else self._training.optimizers:
            # One with a state of its own may keep them.
            if not isinstance(one, Optimizer) or type(one).state_dict is not Optimizer.state_dict:
                continue
            parameters = [p for group in one.param_groups for p in group["params"] if p.requires_grad and p.numel()]
            if all(_memory(p) in known for p in parameters):
                continue
            beside = [self._kept[name] for name in ("extra", "scaler", "hook_state", "per_rank")]
            reached = _reach("", beside, 10 * _NODES_MAX, set(map(id, self._training.optimizers)))
            known |= {_memory(each) for _, each in reached if _is(each, Tensor)}
            if strange := [str(tuple(p.shape)) for p in parameters if _memory(p) not in known]:
                return (
                    f"{type(one).__name__} changes {len(strange)} parameters that are not in the Keeper's model (of "
                    f"shapes {some(strange)}): a restart would begin with new ones. Give all modules: "
                    "Keeper([model, other], optimizer)"
                )
        return ""

    def _look_through(self) -> None:
        """Name the objects of the program that belong to this training, and that no Keeper has."""
        kinds = _Kinds()
        found = [one for one in gc.get_objects() if kinds[type(one)]]
        if self._kept["per_rank"] is None and any(type(one) is DataLoader and _shuffles(one) for one in found):
            self._tell("loader", _LOADER)
        things, memory = _kept_by_all()
        for one in found:
            # An optimizer steps later, and an average may be one of an earlier training, which is not freed yet.
            if id(one) not in things and kinds[type(one)] in ("scheduler", "scaler"):
                self._name(kinds[type(one)], one, memory)

    def _name(self, kind: str, one: Any, memory: set[int]) -> None:
        """Say it if that object, which is not kept, has a state of this training; `memory` is of what is kept."""
        name, held = type(one).__name__, getattr(one, "__dict__", {})
        ours = {id(each) for opt in self._training.optimizers for each in (opt, getattr(opt, "param_groups", opt))}
        is_given = kind in ("scheduler", "scaler") and frozenset(one.state_dict()) in self._keys()
        if kind == "scheduler" and id(held.get("optimizer")) in ours and not is_given:
            self._tell(f"scheduler {name}", _NOT_GIVEN.format(name, "scheduler", "call its step()"))
        elif kind == "scaler" and one.is_enabled() and not is_given:
            self._tell("scaler", _NOT_GIVEN.format(name, "scaler", "call its update()"))
        elif kind == "average":
            shapes = {parameter.shape for parameter in self._training.model.parameters()}
            its = {_memory(each) for _, each in _reach("", held) if _is(each, Tensor) and each.shape in shapes}
            if its and not memory & its:
                memory |= its
                self._tell(f"average {name}", _NOT_GIVEN.format(name, "extra", "update it"))
        elif kind == "optimizer" and not ours & {id(one.param_groups), *map(id, held.values())}:
            self._note(f"optimizer {name}", _OPTIMIZER.format(name), partial(_steps, weakref.ref(one), memory))

    def _keys(self) -> set[frozenset[Any]]:
        """The keys of all dictionaries in `extra`: a program may put state_dicts there."""
        return {frozenset(one) for _, one in _reach("", self._kept["extra"]) if _is(one, dict)}

    def _note(self, kind: str, sentence: str, read: Callable[[], Any]) -> None:
        """After some steps, say that if `read` returns something else than now, and not None."""
        self._movers.append((kind, sentence, read, read()))

    def _note_variables(self) -> None:
        """Look at what the program's variables lead to, and note generators, and tensors that are like the weights."""
        kinds, (things, memory) = _Kinds(), _kept_by_all()
        likes: dict[torch.Size, list[Tensor]] = {}
        for weight in () if self._training.is_in_parts else self._training.model.parameters():
            if weight.requires_grad and len(likes.setdefault(weight.shape, [])) < _AVERAGED_MAX:
                likes[weight.shape].append(_sample(weight))
        averaged = 0
        for path, one in _reach("", dict(variables(sys._getframe(1))), _NODES_MAX, things):
            if kind := kinds[type(one)]:
                self._name(kind, one, memory)
            elif (read := _draws(one)) is not None:
                its = f"[…, {path}]" if _is(one, torch.Generator) else "an object with its state_dict"
                self._note(f"generator {path}", _GENERATOR.format(path, its), read)
            elif (
                averaged < _AVERAGED_MAX
                and _is(one, Tensor)
                and _memory(one) not in memory
                and any(_is_near(one, like) for like in likes.get(one.shape, ()))
            ):
                averaged += 1
                memory.add(_memory(one))
                name = path.partition(".")[0]
                self._note(f"average {name}", _FOLLOWS.format(name), partial(_values, weakref.ref(one)))
            elif self._kept["scheduler"] is None and not _is_own(one) and (its := self._schedule(one)) is not None:
                name, before = type(one).__name__, (self._numbers(), _counters(its))
                self._note(f"scheduler {name}", _SCHEDULE.format(name), partial(self._counted, its, *before))

    def _schedule(self, one: Any) -> dict[str, Any] | None:
        """The attributes of an object that has an optimizer of the Keeper; None if it also has a model, or others."""
        try:
            its = object.__getattribute__(one, "__dict__")
        except AttributeError:
            return None
        has_ours = any(value is each for value in its.values() for each in self._training.optimizers)
        return its if has_ours and not any(_is(value, nn.Module) for value in its.values()) else None

    def _counted(self, its: dict[str, Any], options: list[Any], counters: list[float]) -> list[float] | None:
        """The numbers of such an object if they and the options of the optimizers have changed; else None."""
        now = _counters(its)
        return now if now != counters and self._numbers() != options else None


class _Kinds(dict[type, str]):
    """What an object of a type may be to a training; "" for nothing. Never asks the object, which may be lazy."""

    def __missing__(self, kind: type) -> str:
        of: dict[type, str] = {LRScheduler: "scheduler", torch.amp.GradScaler: "scaler"}
        of |= {AveragedModel: "average", Optimizer: "optimizer"}
        found = "loader" if kind is DataLoader else next((of[one] for one in kind.__mro__ if one in of), "")
        if not found and hasattr(kind, "state_dict") and "__dict__" in dir(kind):
            is_schedule = "schedul" in kind.__name__.lower() and hasattr(kind, "step")
            found = "scheduler" if is_schedule else "average" if _AVERAGE_NAME.search(kind.__name__) else ""
        self[kind] = found
        return found


def _reach(path: str, value: Any, left: int = _NODES_MAX, without: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """The objects that `value` leads to, with their paths, but not those in `without`. A loader's are its own."""
    seen, queue = set(without), deque([(path, value)])
    while queue and left:
        path, value = queue.popleft()
        if id(value) in seen or _is(value, str, bytes, int, float, type(None), type, ModuleType, FunctionType):
            continue
        seen.add(id(value))
        left -= 1
        yield path, value
        items: Any = ()
        if _is(value, dict):
            items = value.items()
        elif _is(value, list, tuple, set, frozenset):
            items = enumerate(value)
        elif not _is(value, Tensor) and not (without and _is_own(value)):
            with contextlib.suppress(Exception):
                items = object.__getattribute__(value, "__dict__").items()
        for key, item in list(islice(items, None if left > _NODES_MAX else _ITEMS_MAX)):
            queue.append((f"{path}.{key if _is(key, str, int) else '…'}".lstrip("."), item))


def _is_own(value: Any) -> bool:
    """Whether what it has is named with it, or is elaunch's."""
    return _is(value, DataLoader, Sampler) or type(value).__module__.startswith("elaunch.")


def _kept_by_all() -> tuple[set[int], set[int]]:
    """The objects, and the memory of the tensors, that the Keepers of this process keep."""
    things, memory = set[int](), set[int]()
    for door in _doors:
        named = door._training.live_tensors.named()
        tensors = [*(one for _, one in named), *door._training.model.buffers()]
        for _, one in _reach("", door._kept):
            things.add(id(one))
            tensors += [one] if _is(one, Tensor) else []
        tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
        memory |= set(map(_memory, tensors))
    return things, memory


def _draws(one: Any) -> Callable[[], Any] | None:
    """A function that returns the present state of a generator; None for another object, and for a global one."""
    if _is(one, torch.Generator):
        return None if one is torch.default_generator else partial(_torchs, one, one.initial_seed())
    if _is(one, random.Random):
        return None if one is getattr(random, "_inst", None) else one.getstate
    numpys: Any = sys.modules.get("numpy.random")
    if numpys is None or not _is(one, numpys.Generator, numpys.RandomState):
        return None
    if one is getattr(numpys.mtrand, "_rand", None):
        return None
    bits = one.bit_generator if _is(one, numpys.Generator) else one._bit_generator
    return lambda: repr(bits.state)


def _torchs(one: torch.Generator, seed: int) -> Any:
    # One that is seeded in each step begins nothing again.
    return one.get_state().tolist() if one.initial_seed() == seed else None


def _steps(one: Callable[[], Any], memory: set[int]) -> Any:
    """The number of changes of what an optimizer has for itself, and of its parameters that no Keeper has."""
    if (optimizer := one()) is None:
        return None
    states = [each for its in optimizer.state.values() if _is(its, dict) for each in its.values() if _is(each, Tensor)]
    own = [p for group in optimizer.param_groups for p in group["params"] if _memory(p) not in memory]
    return len(states), sum(each._version for each in [*states, *own] if not each.is_inference())


def _counters(its: dict[str, Any]) -> list[float]:
    return [value for value in its.values() if _is(value, int, float)]


def _sample(tensor: Tensor) -> Tensor:
    """A few values from its middle."""
    part = local_parts(tensor)[0]
    count = min(_SAMPLE, part.numel())
    begin = part.storage_offset() + (part.numel() - count) // 2
    return part.as_strided((count,), (1,), begin).float().cpu()


def _values(one: Callable[[], Tensor | None]) -> Any:
    return None if (tensor := one()) is None else _sample(tensor).tolist()


def _is_near(tensor: Tensor, like: Tensor) -> bool:
    is_plain = tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type != "meta"
    if not (is_plain and tensor.is_contiguous() and tensor.untyped_storage().nbytes()):
        return False
    return bool((_sample(tensor) - like).norm() <= _NEAR * like.norm()) and bool(like.any())


def _leaves(path: str, value: Any) -> Iterator[tuple[str, int]]:
    """A digest of each tensor and plain value in a nest, by a path as in a program. Not of a part of a tensor."""
    if isinstance(value, Tensor):
        if not is_shard(value):
            is_small = value.nbytes <= _HASHED_BYTES_MAX
            number = crc32(tensors_sha256([value]).encode()) if is_small else digests({"": value})[""]
            yield path, number ^ crc32(repr((value.shape, value.dtype)).encode())
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key}]", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}[{number}]", item)
    elif isinstance(value, set | frozenset):
        yield path, crc32(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield path, crc32(repr(value).encode())


def _way_out(found: str) -> str:
    cost = "after a failure all ranks would have one rank's"
    if found.startswith(("`extra", "`scheduler", "`scaler", "`optimizer")):
        return (
            f"It has one value for all ranks: {cost}. Make it the same on all of them, or give what each rank has for "
            "itself as per_rank=: an object with state_dict and load_state_dict"
        )
    return (
        f"The ranks train one model: {cost}. Seed all ranks alike before the model is made, load weights on all of "
        "them, or wrap it in DistributedDataParallel. Models of each rank's own need names of their own: "
        'nn.ModuleDict({f"rank{rank}": model})'
    )


def _refuse(reason: str) -> None:
    if reason:
        link.refuse(reason)
        raise ValueError(reason)


def _shuffles(loader: Any) -> bool:
    """A loader that does not shuffle is taken for one that evaluates. One with `Order.batches` needs nothing."""
    sampler = loader.sampler
    shuffles = isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
    return shuffles and not isinstance(loader.batch_sampler, BatchSampler)


def _count(scheduler: Any) -> Any:
    # A ChainedScheduler counts in those that it has.
    return [getattr(one, "last_epoch", 0) for one in (scheduler, *getattr(scheduler, "_schedulers", ()))]


def _number(value: Any) -> Any:
    return (f"change {value._version} of a tensor") if isinstance(value, Tensor) else value


def _is(value: object, *kinds: type) -> bool:
    """`isinstance`, without asking a lazy object for its class."""
    return issubclass(type(value), kinds)


def _memory(tensor: Tensor) -> int:
    part = local_parts(tensor)[0]
    return part.data_ptr() if part.layout == torch.strided and part.device.type != "meta" else id(tensor)


def _several(part: Any) -> Sequence[Any]:
    return () if part is None else part if isinstance(part, list | tuple) else (part,)
