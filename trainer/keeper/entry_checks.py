"""Checks at entry, at the first commits and after a restore for state of the program that the Keeper does not keep."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elaunch.trainer import link
from elaunch.trainer.checkpoint.claim import UNNAMED
from elaunch.trainer.keeper.unkept import NODES_MAX, Unkept, digest, is_a, memory_of, named, reach
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.model_state import is_fsdp1
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State, digests, equal, is_shard, several, some


@contextlib.contextmanager
def entered(name: str, memory: str, checkpoints: str) -> Iterator[None]:
    """Hold `name` and `checkpoints` in the block, and also after it if it ends without an error.

    The copies of a name are in `memory`; without one it is free after the block. Raises ValueError if this process
    holds one of them.
    """
    # The key has the process: a forked child does not hold what its parent does. A restart is another program.
    program = os.getpid(), os.environ.get("ELAUNCH_GENERATION", "")
    keys = [(*program, f"named {name!r}", memory)]
    keys += [(*program, f"with checkpoints={checkpoints!r}", "")] if checkpoints else []
    for key in keys:
        if _held().get(key) == "left":
            raise ValueError(
                f"a Keeper {key[2]} has ended in this program, and this one would continue from its last state: give "
                "each training (a phase, a fold) its own name= and checkpoints=. Two loops of one training belong in "
                "one `with` block"
            )
        if key in _held():
            raise ValueError(
                f"a Keeper {key[2]} is entered already, and both would write to the same copies; give each Keeper of a "
                "program its own name= and checkpoints= (or one Keeper all of it: Keeper([model, other], [optimizer, "
                "its_optimizer]))"
            )
    _held().update(dict.fromkeys(keys, "entered"))
    try:
        yield
    except BaseException:
        # The program may catch this and try the same training again.
        for key in keys:
            del _held()[key]
        raise
    for key in keys:
        _held()[key] = "left"
    if not memory:
        del _held()[keys[0]]


def replaced_options(old: Mapping[str, int | None], lose_at_most: int | None) -> int | None:
    """`lose_at_most` from the options that it has replaced. Raises TypeError for others."""
    for option, value in old.items():
        if option not in ("snapshot_every", "copy_every", "stop_every"):
            raise TypeError(f"Keeper has no option {option!r}")
        if option != "stop_every" and lose_at_most is None and value is not None:
            lose_at_most = value if value != 1 else 0
        text = f"lose_at_most={lose_at_most} replaces {option}={value}: the steps that a failure may take back"
        warnings.warn(text, FutureWarning, stacklevel=3)
    return lose_at_most


def require_group(world_size: int, name: str) -> None:
    """Raise ValueError for one of several workers that has no process group, and whose Keeper is not named."""
    if world_size > 1 and name == UNNAMED and not (dist.is_available() and dist.is_initialized()):
        refused = (
            f"this job has {world_size} workers, and this one has no process group: each would train and keep a model "
            "for itself. Call torch.distributed.init_process_group() before the Keeper, or start one worker "
            "(--nproc-per-node 1). If this process is to be alone, as a parameter server, give its Keeper a name= of "
            "its own, and checkpoints= that no other has"
        )
        link.refuse(refused)
        raise ValueError(refused)


def is_alone() -> bool:
    """Whether exactly one Keeper is entered."""
    names = [key for key, how in _held().items() if how == "entered" and key[2].startswith("named")]
    return len(names) == 1


@functools.cache
def _held() -> dict[tuple[int, str, str, str], str]:
    """Whether each is "entered" or "left"."""
    return {}


# After the first of these commits the program's objects are noted, and after the other one compared.
_NOTED_AT, _COMPARED_AT = 1, 4
# At a job's first _SYNCS sync points the ranks compare again what must be equal, later at 2^n and n * _SYNCS_APART.
_SYNCS, _SYNCS_APART = 3, 1024
# Later objects are searched for repeatedly, in at most this share of the time, and at least this far apart.
_SHARE, _APART_S = 0.001, 1.0
# The options that a schedule changes.
_NUMBERS = ("lr", "momentum", "betas", "weight_decay")

_NO_LOOP = (
    "keeper.commit() without keeper.steps: after a failure the program's loop begins at its first step again, with the "
    "restored state, and until the end no checkpoint is written. Loop with `for step in keeper.steps(total):` or "
    "keeper.epochs, or call keeper.step_begin() before each step"
)
_VALUE = (
    "`{}` was changed from {!r:.40} to {!r:.40} up to step {}. It is not kept where the ranks have different models: a "
    "restart resets it. Register it as a buffer, or set it in each step by the step's number"
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


class EntryChecks:
    """The checks of one training. `kept` are the Keeper's arguments by name.

    `path` lists the warnings that the job has printed, in the node's memory; None without one. `is_first` is for a
    job's first generation. With `is_others` the loop is a library's, which owns `extra` and sets options.
    """

    def __init__(
        self,
        training: Training,
        kept: Mapping[str, Any],
        peers: Peers,
        path: Path | None,
        *,
        log: Callable[[str], object],
        is_first: bool,
        is_others: bool,
    ) -> None:
        self._training, self._kept, self._peers, self._path = training, kept, peers, path
        self._log, self._is_first, self.is_others = log, is_first, is_others
        self._warned = set(path.read_text().split("\n")) if path is not None and path.exists() else set[str]()
        self._schedulers = [one for one in several(kept["scheduler"]) if isinstance(one, LRScheduler)]
        # What only a commit may change, beside tensors, at the end of the last one if that was checked.
        self._noted: dict[str, Any] | None = None
        self._unkept = Unkept(training, kept, self._warn, self._options)
        self._again_s, self._is_again = 0.0, False
        self._commits = self._syncs = 0
        self._has_begun = False
        # The number of commits at the last evaluation.
        self._evaluated = -1
        # What this rank drew for a step before a failure, until it has drawn the same again.
        self._expected: tuple[int, State] = (0, {})

    def enter(self, step: int, before: tuple[int, State]) -> None:
        """Check after the restore of `step`. `before` is what an earlier process drew for a step. Collective.

        Raises ValueError for what no restart can restore.
        """
        # A restore makes all ranks alike.
        if reason := self._unknown_parameters() or ("" if step else self._difference()):
            link.refuse(reason)
            raise ValueError(reason)
        if before[0] == step + 1:
            self._expected = before
        if self._is_first and self._peers.leads:
            # Attributes of the program's objects may raise anything, and that must not end the training.
            with contextlib.suppress(Exception):
                self._unkept.scan()

    def commit_begins(self, step: int) -> None:
        """Warn of a scheduler that was stepped since the last commit, and of a loop without `step_begin`."""
        if not self._has_begun and not self.is_others:
            self._warn("loop", _NO_LOOP)
        self._compare(step - 1, self._counts)

    def committed(self, step: int, *, is_checked: bool) -> None:
        """The commit of `step` has ended. Without `is_checked` only options are noted."""
        self._commits += 1
        self._noted = self._counts() | self._settings() if is_checked and self._may_warn("options") else None
        if not (is_checked or self._is_again):
            return
        if step == self._expected[0] and not self.is_others:
            self._warn(
                "drawn",
                f"rank {self._peers.rank} drew other random numbers, or got another batch, in step {step} than before "
                "the failure: they depend on state that the Keeper does not keep; `elaunch rehearse` can name it",
                by_all=True,
            )
        if self._peers.leads and (self._is_first or self._commits > _COMPARED_AT):
            # Attributes of the program's objects may raise anything.
            with contextlib.suppress(Exception):
                self._check_objects()

    def _check_objects(self) -> None:
        if self._commits in (_NOTED_AT, _COMPARED_AT):
            self._unkept.compare()
        elif self._commits == _COMPARED_AT - 1:
            self._unkept.note_weights()
        elif self._is_again:
            self._is_again, begun_s = False, time.monotonic()
            self._unkept.compare()
            self._unkept.scan()
            took_s = time.monotonic() - begun_s
            self._again_s = begun_s + max(_APART_S, took_s / _SHARE)

    def step_begins(self, step: int) -> None:
        """Warn of options that have changed since the commit of `step`. What the next step sets is set again."""
        self._has_begun = True
        if self._evaluated == self._commits:
            self._check_weights()
        if self._commits and (self._evaluated != self._commits or not self._training.shares_buffers):
            # DDP broadcasts those of rank 0 before any pass.
            self._check_buffers()
        self._compare(step, lambda: self._counts() | self._settings())

    def _compare(self, step: int, present: Callable[[], dict[str, Any]]) -> None:
        before = self._noted
        for place, value in present().items() if before is not None else ():
            if before is not None and (place not in before or before[place] != value):
                was = f"from {before[place]!s:.40} " if place in before else ""
                self._warn(
                    "options",
                    f"`{place}` changed outside keeper.commit() after step {step} ({was}to {value!s:.40}): a failure "
                    "in between restores the old value, or the change is made twice. Change it in the commit "
                    "(flags, values and options of an optimizer also at the beginning of a step)",
                )

    def _counts(self) -> dict[str, Any]:
        """The counts of the schedulers. A ChainedScheduler counts in those that it has."""
        every = [each for one in self._schedulers for each in (one, *getattr(one, "_schedulers", ()))]
        numbered = [
            (f"{type(one).__name__}.last_epoch{f' (number {n})' * bool(n)}", one) for n, one in enumerate(every)
        ]
        return {name: getattr(one, "last_epoch", 0) for name, one in numbered}

    def _settings(self) -> dict[str, Any]:
        return {} if self.is_others else self._training.settings.changing() | self._options()

    def _options(self) -> dict[str, Any]:
        """The options of all groups that schedules change; none if a library sets them."""
        its = () if self.is_others else self._training.optimizers
        groups = [group for one in its for group in getattr(one, "param_groups", ())]
        return {
            f"param_groups[{number}].{name}": _number(group.get(name))
            for number, group in enumerate(groups)
            for name in _NUMBERS
        }

    def drawn(self, step: int, own: State) -> None:
        """A backward pass of `step` begins, and `own` is what this rank has drawn and fetched for it."""
        if step == self._expected[0] and self._are_alike(self._expected[1], own):
            self._expected = (0, {})

    def _are_alike(self, one: State, other: State) -> bool:
        """Whether a rank has drawn and fetched the same; of `per_rank` only batches and generators count."""
        if not equal(one["random"], other["random"]):
            return False
        if self._training.per_rank is None or "per_rank" not in one:
            return True
        pairs = zip(self._training.per_rank.kinds, one["per_rank"]["states"], other["per_rank"]["states"], strict=True)
        return all(equal(its, now) for kind, its, now in pairs if kind in ("Batches", "GeneratorState"))

    def watch(
        self, stack: contextlib.ExitStack, check_weights: Callable[[], None], check_buffers: Callable[[], None]
    ) -> None:
        """Until `stack` closes, call `check_weights` when an evaluation begins, and when the next step does.

        Each step begins with `check_buffers`. Steps of another optimizer are detected immediately.
        """
        self._check_weights, self._check_buffers = check_weights, check_buffers
        if self._peers.leads:
            self._unkept.watch_optimizers(stack, lambda: self._commits)

        def before_forward(module: nn.Module, _: object) -> None:
            if not module.training and self._evaluated != self._commits:
                self._evaluated = self._commits
                check_weights()

        for model in self._training.models:
            # A program may evaluate what is in DDP's wrapper; hooks of a compiled module would be compiled too.
            inner = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
            if getattr(inner, "_compiled_call_impl", None) is None:
                stack.callback(inner.register_forward_pre_hook(before_forward).remove)

    def sync_point(self, step: int) -> None:
        """Search again for state that is not kept, and compare what must be equal on all ranks. Collective.

        A program may begin an average, or make another optimizer, in mid-training.
        """
        if not self._commits:
            return
        self._syncs += 1
        for path, (old, new) in self._training.settings.find_changes().items():
            if self._training.has_names_of_its_own:
                self._warn("value", _VALUE.format(path, old, new, step), by_all=True)
        # A restart has no time for it, and has made the ranks alike.
        is_power_of_2 = not self._syncs & (self._syncs - 1)
        is_due = self._is_first if self._syncs <= _SYNCS else is_power_of_2 or not self._syncs % _SYNCS_APART
        if is_due and (found := self._difference(f" after step {step}")):
            self._warn("ranks", found)
        if self._peers.leads and self._commits > _COMPARED_AT and time.monotonic() >= self._again_s:
            self._is_again = not self.is_others
            if self._is_again:
                self._unkept.note_weights()

    def _may_warn(self, kind: str, *, by_all: bool = False) -> bool:
        return kind not in self._warned and (by_all or self._peers.leads)

    def _warn(self, kind: str, sentence: str, *, by_all: bool = False) -> None:
        """Warn once per job: rank 0 only, unless `by_all`."""
        if not self._may_warn(kind, by_all=by_all):
            return
        self._warned.add(kind)
        if self._path is not None:
            # On a full disk the warning is repeated after a restart.
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(f"{kind}\n")
        self._log(sentence)

    def _difference(self, when: str = "") -> str:
        """A sentence about what differs between two ranks; "" if nothing does. Collective."""
        if self._peers.world_size == 1:
            return ""
        own = dict(self._alike())
        if len(set(self._peers.all_gather(crc32(repr(sorted(own.items())).encode())))) == 1:
            return ""
        found = self._peers.all_gather(own)
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
        weights = () if has_parts else [*training.model.named_parameters()]
        seen = [(name, one) for name, one in weights if not is_shard(one) and (one.requires_grad or not is_later)]
        # DDP and FSDP reduce in the order of those that need a gradient.
        yield from ((f"requires_grad of {name}", "False") for name, one in weights if not one.requires_grad)
        live = {name: one.detach() for name, one in seen}
        for name, number in digests(live).items():
            yield name, f"{number:x} {live[name].shape} {live[name].dtype}"
        yield from ((f"attribute {path}", repr(value)) for path, value in training.settings.values.now().items())
        parts: dict[str, Any] = {}
        numbers = {id(weight): number for number, weight in enumerate(training.model.parameters())}
        for n, one in enumerate(each for each in training.optimizers if hasattr(each, "param_groups")):
            name = f"optimizer {n}" if n else "optimizer"
            options = ({key: value for key, value in its.items() if key[:5] != "param"} for its in one.param_groups)
            parts[f"{name}.param_groups"] = [*options]
            if not (is_later or training.is_in_parts):
                # An optimizer's state has parameters by number.
                order = [[numbers.get(id(weight)) for weight in group["params"]] for group in one.param_groups]
                parts[f"{name}.order of parameters"] = repr(order)
            is_own = has_parts or training.has_names_of_its_own
            if not (is_own or training.has_zero or (is_later and not training.is_in_parts)):
                # With FSDP what is not a DTensor.
                parts[f"{name}.state"] = [*getattr(one, "state", {}).values()]
        for name in ("scheduler", "scaler") if self.is_others else ("scheduler", "scaler", "extra"):
            of_name = several(self._kept[name])
            for number, part in enumerate(of_name):
                # Objects may record times.
                if not is_later or name != "extra" or is_a(part, dict, list, Tensor, nn.Module):
                    state = part.state_dict() if hasattr(part, "state_dict") else part
                    if is_later and is_a(part, nn.Module):
                        state = self._without_copies(state)
                    parts[f"{name}.{number}" if len(of_name) > 1 else name] = state
        for name, part in parts.items():
            found = named(name, part)
            yield from ((path, digest(its)) for path, its in found if not (isinstance(its, Tensor) and is_shard(its)))

    def _without_copies(self, state: State) -> State:
        """The state of an average without copies of this rank's own buffers: each update makes new ones."""
        own = [*self._training.model.buffers()]
        return {name: its for name, its in state.items() if not any(equal(its, one) for one in own)}

    def _unknown_parameters(self) -> str:
        """A sentence about an optimizer's parameters that the Keeper does not have; "" if there are none."""
        known = {memory_of(one) for _, one in self._training.live_tensors.named(optimizers=False)}
        for one in () if self._training.is_in_parts else self._training.optimizers:
            # An optimizer with a state_dict of its own may save them.
            if not isinstance(one, Optimizer) or type(one).state_dict is not Optimizer.state_dict:
                continue
            unknown = [p for group in one.param_groups for p in group["params"] if p.requires_grad and p.numel()]
            if not (unknown := [p for p in unknown if memory_of(p) not in known]):
                continue
            beside = [self._kept[name] for name in ("extra", "scaler", "hook_state", "per_rank")]
            reached = reach("", beside, 10 * NODES_MAX, set(map(id, self._training.optimizers)))
            known |= {memory_of(each) for _, each in reached if is_a(each, Tensor)}
            if shapes := [str(tuple(p.shape)) for p in unknown if memory_of(p) not in known]:
                return (
                    f"{type(one).__name__} changes {len(shapes)} parameters that are not in the Keeper's model (of "
                    f"shapes {some(shapes)}): a restart would reinitialize them. Pass all modules: "
                    "Keeper([model, other], optimizer)"
                )
        return ""


def _number(value: Any) -> Any:
    return (f"change {value._version} of a tensor") if isinstance(value, Tensor) else value
