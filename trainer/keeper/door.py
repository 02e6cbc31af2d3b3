"""Checks at entry, at the first commits and after a restore for state of the program that the Keeper does not keep."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
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
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from elaunch.trainer import link
from elaunch.trainer.data.order import BatchSampler
from elaunch.trainer.keeper.rehearsal import digest, generator_state, named, variables
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.digests import digests
from elaunch.trainer.state.model_state import is_fsdp1
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State, equal, is_shard, local_parts, several, some, tensors_in

# After the first of these commits the program's objects are noted, and after the other one compared.
_NOTED_AT, _COMPARED_AT = 1, 4
# At so many looks of a job the ranks compare once more what they must have alike.
_LOOKS = 3
# How far the program's objects are followed. What is larger is data.
_NODES_MAX, _ITEMS_MAX, _PATH_MAX, _AVERAGED_MAX = 20_000, 1_000, 1_000, 64
# An average of weights is so near to them, as a part of their norm; so many values are looked at.
_NEAR, _SAMPLE = 0.3, 64
_LEAVES = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)
_LOOKED_FOR = (DataLoader, LRScheduler, torch.amp.GradScaler)
# The options that a schedule changes.
_NUMBERS = ("lr", "momentum", "betas", "weight_decay")

_LOADER = (
    "a DataLoader of this program shuffles, and its position is not kept: after a restart it starts over, and samples "
    "are repeated or skipped. Wrap it: batches = elaunch.trainer.Batches(loader), pass per_rank=batches, and call "
    "next(batches) in the loop. If the order needs no state, pass per_rank=()"
)
_NO_LOOP = (
    "keeper.commit() without keeper.steps: after a failure the program's loop begins at its first step again, with the "
    "restored state, and until the end no checkpoint is written. Loop by `for step in keeper.steps(total):` or "
    "keeper.epochs, or call keeper.step_begin() before each step"
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
    "the commit"
)
_GENERATOR = (
    "the steps draw from the generator `{}`, which is not kept: a restart resets it, and the run differs from one "
    "without a failure. Pass it to the Keeper (per_rank={}), or draw from the global generators, which are kept"
)
_COST = "after a failure all ranks would load one rank's"
_EACH_ITS_OWN = (
    f"It must be the same on all ranks: {_COST}. Make it so, or pass state that differs per rank as per_rank=: an "
    "object with state_dict and load_state_dict"
)
_ONE_MODEL = (
    f"The ranks train one model: {_COST}. Seed all ranks alike before the model is made, load weights on all of them, "
    "or wrap it in DistributedDataParallel. Models of each rank's own need names of their own: "
    'nn.ModuleDict({f"rank{rank}": model})'
)
# Those of this process's Keepers.
_doors: weakref.WeakSet[Door] = weakref.WeakSet()


class Door:
    """The checks of one training. `kept` are the Keeper's arguments by name.

    `path` lists the warnings that the job has printed, in the node's memory; None without one. `is_first` is for a
    job's first generation. With `is_others` the loop is a library's, and `extra` and where it sets options are its own.
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
        self._schedulers = [one for one in several(kept["scheduler"]) if isinstance(one, LRScheduler)]
        # What schedules change, by name, at the end of the last commit.
        self._scheduled: dict[str, Any] = {}
        self._movers: list[tuple[str, str, Callable[[], Any], Any]] = []
        self._commits = self._looks = 0
        self._has_begun = False
        # The number of commits at the last evaluation.
        self._evaluated = -1
        # What this rank drew for a step before a failure, until it has drawn the same for it.
        self._expected: tuple[int, State] = (0, {})

    def enter(self, step: int, before: tuple[int, State]) -> None:
        """Check after the restore of `step`. `before` is what an earlier process drew for a step. Collective.

        Raises ValueError for what no restart can restore.
        """
        _doors.add(self)
        # A restore makes all ranks alike.
        if reason := self._strange_parameters() or ("" if step else self._difference()):
            link.refuse(reason)
            raise ValueError(reason)
        if before[0] == step + 1:
            self._expected = before
        if self._is_first and self._peers.leads:
            # Attributes of the program's objects may raise anything, and that must not end the training.
            with contextlib.suppress(Exception):
                self._look_through()

    def commit_begins(self, step: int) -> None:
        """Name a scheduler that was stepped since the last commit, and a program without `step_begin`."""
        if not self._has_begun and not self.is_others:
            self._tell("loop", _NO_LOOP)
        self._compare_scheduled(step - 1, self._counts)

    def committed(self, step: int) -> None:
        """The commit of `step` has ended."""
        self._commits += 1
        if self._may_tell("options"):
            self._scheduled = self._what_schedules_change()
        if step == self._expected[0] and not self.is_others:
            self._tell(
                "drawn",
                f"rank {self._peers.rank} drew other random numbers, or got another batch, in step {step} than before "
                "the failure: they depend on state that the Keeper does not keep; `elaunch rehearse` can name it",
                by_all=True,
            )
        if self._is_first and self._peers.leads and self._commits == _NOTED_AT:
            with contextlib.suppress(Exception):
                self._note_variables()
        elif self._commits == _COMPARED_AT:
            for kind, sentence, read, before in self._movers:
                with contextlib.suppress(Exception):
                    if read() not in (None, before):
                        self._tell(kind, sentence)
            self._movers = []

    def step_begins(self, step: int) -> None:
        """Name options that have changed since the commit of `step`. What the next step sets is set again."""
        self._has_begun = True
        if self._evaluated == self._commits:
            self._look_at_weights()
        self._compare_scheduled(step, self._what_schedules_change)

    def _what_schedules_change(self) -> dict[str, Any]:
        return self._counts() | self._numbers()

    def _compare_scheduled(self, step: int, read: Callable[[], dict[str, Any]]) -> None:
        for name, value in read().items() if self._may_tell("options") else ():
            if name in self._scheduled and (old := self._scheduled[name]) != value:
                self._tell(
                    "options",
                    f"`{name}` changed outside keeper.commit() after step {step} (from {old!s:.40} to {value!s:.40}): "
                    "a failure in between restores the old value, or the change is made twice. Change it in the commit "
                    "(options of an optimizer also at the beginning of a step)",
                )

    def _counts(self) -> dict[str, Any]:
        # A ChainedScheduler counts in those that it has.
        every = [each for one in self._schedulers for each in (one, *getattr(one, "_schedulers", ()))]
        return {f"{type(one).__name__}.last_epoch": getattr(one, "last_epoch", 0) for one in every}

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
            if found := self._difference(f" after step {step}"):
                self._tell("ranks", found)

    def _may_tell(self, kind: str, *, by_all: bool = False) -> bool:
        return kind not in self._said and (by_all or self._peers.leads)

    def _tell(self, kind: str, sentence: str, *, by_all: bool = False) -> None:
        """Warn once per job: rank 0 only, unless `by_all`."""
        if not self._may_tell(kind, by_all=by_all):
            return
        self._said.add(kind)
        if self._path is not None:
            # On a full disk the warning is repeated after a restart.
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(f"{kind}\n")
        self._say(sentence)

    def _numbers(self) -> dict[str, Any]:
        """The options of all groups that schedules change; none if a library sets them."""
        its = () if self.is_others else self._training.optimizers
        groups = enumerate(group for one in its for group in getattr(one, "param_groups", ()))
        return {f"param_groups[{n}].{name}": _number(group.get(name)) for n, group in groups for name in _NUMBERS}

    def _difference(self, when: str = "") -> str:
        """A sentence about what differs between two ranks; "" if nothing does. Collective."""
        if self._peers.world_size == 1:
            return ""
        own = dict(self._alike())
        if len(set(self._peers.from_all(crc32(repr(sorted(own.items())).encode())))) == 1:
            return ""
        found = self._peers.from_all(own)
        # With parameters of its own a rank may lack a name.
        all_names = {} if self._training.has_names_of_its_own else dict.fromkeys(name for its in found for name in its)
        first: dict[str, tuple[int, str | None]] = {}
        for rank, its in enumerate(found):
            values = {**all_names, **its}
            if names := [name for name, value in values.items() if first.setdefault(name, (rank, value))[1] != value]:
                is_own = names[0].startswith(("extra", "scheduler", "scaler", "optimizer"))
                which, whose = some(f"`{name}`" for name in names), first[names[0]][0]
                way_out = _EACH_ITS_OWN if is_own else _ONE_MODEL
                return f"{which} of rank {rank} differs from rank {whose}'s{when}. {way_out}"
        return ""

    def _alike(self) -> Iterator[tuple[str, str]]:
        """A digest of each part that a failure would make alike; after the first commit only of what changes."""
        training, is_later = self._training, bool(self._commits)
        # FSDP1's parts have no type of their own.
        has_parts = is_fsdp1(training.model)
        weights = () if has_parts else training.model.named_parameters()
        seen = [(name, one) for name, one in weights if not is_shard(one) and (one.requires_grad or not is_later)]
        live = {name: one.detach() for name, one in seen}
        for name, number in digests(live).items():
            yield name, f"{number:x} {live[name].shape} {live[name].dtype}"
        parts: dict[str, Any] = {}
        numbers = {id(weight): number for number, weight in enumerate(training.model.parameters())}
        for n, one in enumerate(each for each in training.optimizers if hasattr(each, "param_groups")):
            name = f"optimizer {n}" if n else "optimizer"
            options = ({key: value for key, value in its.items() if key[:5] != "param"} for its in one.param_groups)
            parts[f"{name}.param_groups"] = [*options]
            if not (is_later or training.is_in_parts):
                # A state has its parameters by their numbers.
                order = [[numbers.get(id(weight)) for weight in group["params"]] for group in one.param_groups]
                parts[f"{name}.order of parameters"] = repr(order)
            is_own = has_parts or training.has_names_of_its_own
            if not (is_own or training.has_zero or (is_later and not training.is_in_parts)):
                # With FSDP what is no DTensor.
                parts[f"{name}.state"] = [*getattr(one, "state", {}).values()]
        for name in ("scheduler", "scaler") if self.is_others else ("scheduler", "scaler", "extra"):
            of_name = several(self._kept[name])
            for number, part in enumerate(of_name):
                # Objects may record times.
                if not is_later or name != "extra" or _is(part, dict, list, Tensor):
                    state = part.state_dict() if hasattr(part, "state_dict") else part
                    parts[f"{name}.{number}" if len(of_name) > 1 else name] = state
        for name, part in parts.items():
            found = named(name, part)
            yield from ((path, digest(its)) for path, its in found if not (isinstance(its, Tensor) and is_shard(its)))

    def _strange_parameters(self) -> str:
        """A sentence about an optimizer's parameters that the Keeper does not have; "" if there are none."""
        known = {_memory(one) for _, one in self._training.live_tensors.named(optimizers=False)}
        for one in () if self._training.is_in_parts else self._training.optimizers:
            # An optimizer with a state_dict of its own may save them.
            if not isinstance(one, Optimizer) or type(one).state_dict is not Optimizer.state_dict:
                continue
            strange = [p for group in one.param_groups for p in group["params"] if p.requires_grad and p.numel()]
            if not (strange := [p for p in strange if _memory(p) not in known]):
                continue
            beside = [self._kept[name] for name in ("extra", "scaler", "hook_state", "per_rank")]
            reached = _reach("", beside, 10 * _NODES_MAX, set(map(id, self._training.optimizers)))
            known |= {_memory(each) for _, each in reached if _is(each, Tensor)}
            if shapes := [str(tuple(p.shape)) for p in strange if _memory(p) not in known]:
                return (
                    f"{type(one).__name__} changes {len(shapes)} parameters that are not in the Keeper's model (of "
                    f"shapes {some(shapes)}): a restart would reinitialize them. Pass all modules: "
                    "Keeper([model, other], optimizer)"
                )
        return ""

    def _look_through(self) -> None:
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

    def _note_variables(self) -> None:
        """Note optimizers, generators, and tensors that are like the weights, that the program's variables lead to."""
        things, memory = _kept_by_all()
        ours = {id(each) for one in self._training.optimizers for each in (one, getattr(one, "param_groups", one))}
        likes: dict[torch.Size, list[Tensor]] = {}
        for weight in self._training.model.parameters():
            if weight.requires_grad and len(likes.setdefault(weight.shape, [])) < _AVERAGED_MAX:
                likes[weight.shape].append(_sample(weight))
        averaged = 0
        for path, one in _reach("", dict(variables(sys._getframe(1))), _NODES_MAX, things):
            name = type(one).__name__
            # Another one may be a library's, around ours.
            if _is(one, Optimizer) and not ours & {id(one.param_groups), *map(id, vars(one).values())}:
                self._note(f"optimizer {name}", _OPTIMIZER.format(name), partial(_steps, one, memory))
            elif (read := _draws(one)) is not None:
                its = f"[…, {path}]" if _is(one, torch.Generator) else "an object with its state_dict"
                self._note(f"generator {path}", _GENERATOR.format(path, its), read)
            elif (
                averaged < _AVERAGED_MAX
                and _is(one, Tensor)
                and _memory(one) not in memory
                and any(_is_near(_sample(one), like) for like in likes.get(one.shape, ()))
            ):
                averaged += 1
                memory.add(_memory(one))
                name = path.partition(".")[0]
                self._note(f"average {name}", _FOLLOWS.format(name), partial(_values, weakref.ref(one)))
            elif self._kept["scheduler"] is None and (held := self._schedule(one)) is not None:
                name, before = type(one).__name__, (self._numbers(), _counters(held))
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
        return its if has_ours and not any(_is(value, nn.Module) for value in its.values()) else None

    def _counted(self, its: dict[str, Any], options: dict[str, Any], counters: list[float]) -> list[float] | None:
        """The numbers of such an object if they and the options of the optimizers have changed; else None."""
        now = _counters(its)
        return now if now != counters and self._numbers() != options else None


def _reach(path: str, value: Any, left: int = _NODES_MAX, without: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """All objects reachable from `value`, with their paths, breadth first, but not through those in `without`."""
    seen, queue = set(without), deque([(path, value)])
    while queue and left:
        path, value = queue.popleft()
        if len(path) > _PATH_MAX or id(value) in seen or _is(value, *_LEAVES):
            continue
        seen.add(id(value))
        left -= 1
        yield path, value
        items: Any = ()
        if _is(value, dict):
            items = value.items()
        elif _is(value, list, tuple, set, frozenset):
            items = enumerate(value)
        elif not _is(value, Tensor) and not (
            without and (_is(value, DataLoader, Sampler) or type(value).__module__.startswith("elaunch."))
        ):
            with contextlib.suppress(Exception):
                items = object.__getattribute__(value, "__dict__").items()
        for key, item in list(islice(items, None if left > _NODES_MAX else _ITEMS_MAX)):
            queue.append((f"{path}.{key if _is(key, str, int) else '…'}".lstrip("."), item))


def _kept_by_all() -> tuple[set[int], set[int]]:
    """The objects, and the memory of the tensors, that the Keepers of this process keep."""
    things, memory = set[int](), set[int]()
    for door in _doors:
        live = door._training.live_tensors.named()
        tensors = [*(one for _, one in live), *door._training.model.buffers()]
        for _, one in _reach("", door._kept):
            things.add(id(one))
            tensors += [one] if _is(one, Tensor) else []
        memory |= set(map(_memory, tensors))
    return things, memory


def _draws(one: Any) -> Callable[[], Any] | None:
    """A function that returns the present state of a generator; None for another object, and for a global one."""
    numpys = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    if one is torch.default_generator or one is numpys or generator_state(one) is None:
        return None
    if not _is(one, torch.Generator):
        return partial(generator_state, one)
    seed = one.initial_seed()
    # One that each step seeds needs no state.
    return lambda: one.get_state().tolist() if one.initial_seed() == seed else None


def _steps(optimizer: Optimizer, memory: set[int]) -> Any:
    """Version counters of an optimizer's state, and of those of its parameters that no Keeper has."""
    own = [p for group in optimizer.param_groups for p in group["params"] if _memory(p) not in memory]
    states = [*tensors_in([*optimizer.state.values()])]
    return len(states), sum(each._version for each in [*states, *own])


def _counters(its: dict[str, Any]) -> list[float]:
    return [value for value in its.values() if _is(value, int, float)]


def _sample(tensor: Tensor) -> Tensor:
    """A few values from its middle; none where they are not floating-point numbers side by side."""
    part = local_parts(tensor)[0]
    is_plain = part.is_floating_point() and part.layout == torch.strided and part.device.type != "meta"
    if not (is_plain and part.is_contiguous() and part.untyped_storage().nbytes()):
        return torch.empty(0)
    begin = (part.numel() - _SAMPLE) // 2
    return part.flatten()[max(0, begin) :][:_SAMPLE].float().cpu()


def _values(one: Callable[[], Tensor | None]) -> Any:
    return None if (tensor := one()) is None else _sample(tensor).tolist()


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


def _number(value: Any) -> Any:
    return (f"change {value._version} of a tensor") if isinstance(value, Tensor) else value


def _is(value: object, *kinds: type) -> bool:
    """`isinstance`, without asking a lazy object for its class."""
    return issubclass(type(value), kinds)


def _memory(tensor: Tensor) -> int:
    part = local_parts(tensor)[0]
    return part.data_ptr() if part.layout == torch.strided and part.device.type != "meta" else id(tensor)
