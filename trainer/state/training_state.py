"""The objects of a training whose state is kept, and that state as nested dictionaries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from elaunch.trainer.state import rng_state
from elaunch.trainer.state.live_tensors import Buffers, LiveTensors, load_module
from elaunch.trainer.state.model_state import (
    Models,
    is_in_parts,
    is_zero,
    kinds_of,
    load_optimizer,
    moments_of,
    passes_to_final_sums,
    put_options,
    restore,
    state_of,
    unwrap,
    without_buffers,
)
from elaunch.trainer.state.packing import NotPlain, not_plain
from elaunch.trainer.state.rank_objects import HookState, RankObjects
from elaunch.trainer.state.rng_state import RandomStates
from elaunch.trainer.state.settings import Settings
from elaunch.trainer.state.tree import (
    OPTIMIZERS,
    State,
    cloned,
    flatten,
    local_parts,
    put_into,
    several,
    tensors_sha256,
)

Found = TypeVar("Found")


class Training:
    """Model, optimizer and every other object with a state.

    *Replicated* state is the same on every rank. A rank's *own* state is its buffers (DDP broadcasts rank 0's at each
    forward pass), the states of its random generators and of its `per_rank` objects, and a large part: the state of a
    communication hook. With FSDP, ZeRO-1 and pipelines the state `is_in_parts`: no rank has all of it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Any = None,
        hook_state: Any = None,
        per_rank: Any = None,
    ) -> None:
        for name, part in (("model", model), ("scheduler", scheduler), ("scaler", scaler)):
            for one in several(part):
                if not hasattr(one, "modules" if name == "model" else "state_dict"):
                    needed = "an nn.Module, or a list of them" if name == "model" else "an object with state_dict"
                    raise TypeError(f"{name} is {one!r:.100}; it is {needed}")
        # As the program calls them: wrapped in DDP or FSDP, compiled.
        self.models: list[nn.Module] = list(several(model))
        self._wrapped = Models(self.models) if len(self.models) > 1 else self.models[0]
        self.model = unwrap(self._wrapped)
        self.optimizers = several(optimizer)
        self._hook = None if hook_state is None else HookState(hook_state)
        # Whether a rank's own state has a large part.
        self.has_large = self._hook is not None
        self.has_scaler = scaler is not None
        # Whether more than the model and the optimizers changes in a step, and is the same on every rank.
        self.has_scheduler_or_extra = not (scheduler is None and extra is None)
        self.per_rank = RankObjects(several(per_rank)) if per_rank is not None else None
        self.has_zero = any(is_zero(one) for one in self.optimizers)
        self.is_in_parts = any(is_in_parts(self._wrapped, one) for one in self.optimizers)
        # The names and types of all ranks' parameters and buffers, if the ranks have different ones.
        self._names_of_all: list[tuple[str, str]] = []
        self.has_names_of_its_own = False
        extra = _parts_of(extra)
        self.live_tensors = LiveTensors(self.model, self.optimizers, several(extra))
        self.settings = Settings(self.models, self.model, self.optimizers)
        if self.has_zero and len(self.optimizers) > 1:
            raise ValueError(
                f"{len(self.optimizers)} optimizers, one of them a ZeroRedundancyOptimizer, cannot be kept together; "
                "give one ZeroRedundancyOptimizer all parameters, in groups, or use fully_shard"
            )
        self._rest = {"scheduler": scheduler, "scaler": scaler, "extra": extra, "optimizers": ()}
        self._divide_optimizers()
        self._has_extra_state = any(
            type(module).get_extra_state is not nn.Module.get_extra_state for module in self.model.modules()
        )
        self.device = _device_of(self.model)
        self.random = RandomStates(self.device)
        self._buffers = Buffers(self.model, self.device)
        # The buffers that the last commit has changed, copied, since the next forward pass may change them again.
        self.of_commit: State = {}
        # Whether DDP broadcasts rank 0's buffers in each forward pass.
        self.shares_buffers = all(map(_shares_buffers, self.models))
        parts = [*self._wrapped.modules(), *self.optimizers]
        self._joinable: list[Any] = [one for one in parts if hasattr(one, "_join_config")]

    def _divide_optimizers(self) -> None:
        # FSDP's optimizers share one state, by the names of the parameters.
        self._others = self.optimizers[1:] if self.is_in_parts else ()
        self._rest["optimizers"] = () if self.is_in_parts else self.optimizers[1:]

    def compare_names(self, all_gather: Callable[[Any], list[Any]]) -> None:
        """Check whether the ranks have different parameters, as the stages of a pipeline have. Collective.

        Then the state is in parts, by the names of the parameters. `all_gather` returns every rank's value. Raises
        ValueError if an optimizer is a ZeroRedundancyOptimizer, or its options differ between the ranks.
        """
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        own = [(name, str(value.dtype)) for name, value in tensors]
        if len(set(all_gather(hashlib.sha256(repr(own).encode()).hexdigest()))) == 1:
            return
        if self.has_zero:
            raise ValueError(
                "the ranks have different parameters, and a ZeroRedundancyOptimizer divides the same ones among all "
                "ranks; use fully_shard in each stage"
            )
        options = all_gather(repr(self.settings.options()))
        if other := [rank for rank, its in enumerate(options) if its != options[0]]:
            raise ValueError(
                f"the ranks have different parameters, and rank {other[0]}'s optimizer has other options than rank 0's "
                f"({options[other[0]]:.200} and {options[0]:.200}); a pipeline keeps one set of options for all "
                "stages: give each stage's optimizer the same groups with the same options"
            )
        self._names_of_all = sorted({pair for names in all_gather(own) for pair in names})
        self.is_in_parts = self.has_names_of_its_own = True
        self._divide_optimizers()

    def require_no_join(self, otherwise: str) -> None:
        """Raise ValueError if torch's `join()` lets ranks end at different steps."""
        for one in self._joinable:
            if one._join_config.enable:
                raise ValueError(
                    f"join() is on for {type(one).__name__}: a rank without further inputs would wait there, and each "
                    f"step of the Keeper needs all ranks; leave out join(), and {otherwise}"
                )

    def layout(self) -> bytes:
        """A digest of the state's structure: names and shapes of the model, classes of the other parts."""
        digest = hashlib.sha256(repr(self._names_of_all).encode() if self._names_of_all else b"")
        named = [*self.model.named_parameters(), *self.model.named_buffers()] if not self._names_of_all else []
        for name, value in named:
            # The shape of a part depends on the world size.
            digest.update(repr((name, value.dtype, () if self.is_in_parts else tuple(value.shape))).encode())
        for name, part in [*self._rest.items(), ("optimizer", self.optimizers)]:
            digest.update(repr((name, [type(one).__qualname__ for one in several(part)])).encode())
        if self.per_rank is not None:
            digest.update(repr(self.per_rank.kinds).encode())
        return digest.digest()[:16]

    def replicated(self) -> State:
        """The replicated state, with the live tensors that training changes."""
        model = self.model.state_dict()
        without_buffers(model, self._buffers)
        own = [self.settings.of_step(0, one.state_dict()) for one in self.optimizers[:1]]
        return {"model": model, "optimizer": own, "of_commit": self.of_commit, **self.rest()}

    def rest(self) -> State:
        """The part of the state that is neither the model's nor the first optimizer's."""
        state: State = {name: [_state_of(one) for one in several(part)] for name, part in self._rest.items()}
        others = enumerate(state["optimizers"], 1)
        state["optimizers"] = [self.settings.of_step(number, its) for number, its in others]
        if not self._names_of_all:
            state["settings"] = self.settings.state()
        return {**state, "param_groups": self.settings.options()}

    def small(self) -> State:
        """The small part of a state in parts, the same on all ranks: what does not change in place."""
        return {name: its for name, its in self.rest().items() if name != "optimizers"}

    def large(self) -> State:
        """The rest of a state in parts: the parameters and what the optimizers keep for them."""
        state = self._state()
        without_buffers(state["model"], self._buffers)
        return state

    def _state(self) -> State:
        by_name = self.has_names_of_its_own
        return state_of(self._wrapped, self.optimizers[0], *self._others, by_name=by_name)

    def live(self) -> list[Tensor] | None:
        """The tensors of `large`, which training changes in place. None if other values change with them."""
        moments = [each for one in self.optimizers for each in moments_of(one)]
        if self._has_extra_state or not all(isinstance(each, Tensor) for each in moments):
            return None
        return [*self.model.parameters(), *moments]

    def own(self, *, large: bool = False) -> State:
        """This rank's own current state except its buffers. Its tensors are the live ones, except the random states."""
        state: State = {"random": self.random.capture()}
        if self.per_rank is not None:
            state["per_rank"] = cloned(self.per_rank.state_dict())
        if large and self._hook is not None:
            state["hook"] = self._hook.state_dict()
        return state

    def require_plain(self, *, durably: bool) -> None:
        """Raise NotPlain with the name of the part if some value of the state cannot be kept.

        With `durably` it must also fit into checkpoints: TypeError, or ValueError for two tensors of one name.
        """
        try:
            self.live_tensors.require_dense()
            parts, own = self.rest() if self.is_in_parts else self.replicated(), self.own(large=True)
            for name, part in {**parts, **self.buffers(), **own}.items():
                if why := not_plain(part, name, deeply=True):
                    raise NotPlain(why)
            if durably:
                flatten({**self.rest(), "per_rank": own.get("per_rank")})
        except RecursionError:
            raise NotPlain("a dictionary or a list of the state contains itself, and cannot be kept") from None

    def unkept_value(self, *, durably: bool) -> str:
        """A sentence about a value of the optimizers, the scheduler or `extra` that cannot be kept; "" if all can.

        The result of an `extra` object's `state_dict`, or an optimizer's overridden one, is checked at each snapshot.
        """
        try:
            self.live_tensors.require_dense(quickly=True)
        except NotPlain as error:
            return str(error)
        groups = [getattr(one, "param_groups", ()) for one in self.optimizers]
        options = [[{key: group[key] for key in group if key != "params"} for group in its] for its in groups]
        found = not_plain(options, "param_groups", durably=durably)
        for one in self.optimizers:
            # Hooks of state_dict may leave values out.
            if type(one).state_dict is Optimizer.state_dict and not vars(one).get("_optimizer_state_dict_post_hooks"):
                found = found or not_plain([*one.state.values()], "optimizer.state", durably=durably)
        # Not the scaler: its state_dict synchronizes the device.
        for name in ("scheduler", "extra"):
            for number, part in enumerate(several(self._rest[name])):
                if not found and (name != "extra" or not hasattr(part, "state_dict")):
                    found = not_plain(_state_of(part), f"{name}.{number}", durably=durably)
        return found

    def refusal(self) -> str:
        """Why a restart could not restore what the program has set on its models and optimizers; "" if it can."""
        how = {"is_in_parts": self.is_in_parts, "has_zero": self.has_zero, "is_by_name": self.has_names_of_its_own}
        return self.settings.refusal(**how)

    def buffers(self) -> State:
        """This rank's buffers, as `Buffers.now` returns them: the live tensors."""
        return self._buffers.now()

    @property
    def has_buffers(self) -> bool:
        """Whether any buffers are kept."""
        return any(self.buffers().values())

    def warm_up(self, one_pass: Callable[[], object] | None, world_size: int) -> None:
        """Make DDP sum gradients in its final order. Everything else is restored; changes of buffers count from now on.

        `one_pass` runs one forward and backward pass, and is called as often as DDP needs.
        """
        passes = passes_to_final_sums(self.models, world_size) if one_pass else 0
        if one_pass is not None and passes:
            before: State = cloned({**self.own(large=True), **self._buffers.now(all_of_them=True)})
            for _ in range(passes):
                one_pass()
            self._buffers.put(before, all_of_them=True)
            self.load_random(before)
            self._buffers.note()
        for model in self.models:
            model.zero_grad(set_to_none=True)

    def buffers_apart(self, broadcast: Callable[[Any], Any], *, leads: bool) -> State:
        """This rank's buffers that a checkpoint's model lacks or has with other values. Collective.

        Those that are not persistent and have changed, on rank 0 those that are `mismatched`, and on other ranks those
        that differ from rank 0's.
        """
        now = self.buffers()
        if self.shares_buffers:
            its = {"buffers": self._buffers.mismatched(), "transient": now["transient"]}
            return its if leads else {"buffers": {}, "transient": {}}
        sums = {name: value if value is None else tensors_sha256([value]) for name, value in now["buffers"].items()}
        of_rank_0 = broadcast(sums)
        others = {n: v for n, v in now["buffers"].items() if n not in of_rank_0 or sums[n] != of_rank_0[n]}
        return {"buffers": self._buffers.mismatched() if leads else others, "transient": now["transient"]}

    def load_replicated(self, state: State) -> None:
        """Load a replicated state; it is copied."""
        self.settings.load_groups(state)
        self.model.load_state_dict({**self.model.state_dict(), **state["model"]})
        for one, its in zip(self.optimizers, [*state["optimizer"], *state["optimizers"]], strict=True):
            load_optimizer(one, its)
        self.of_commit = cloned(state.get("of_commit", {}))
        self._load_rest({name: its for name, its in state.items() if name != "optimizers"})

    def load_own(self, state: State, *, only_buffers: bool = False) -> None:
        """Load a rank's own state; it is copied. Pass `only_buffers` if it was another rank's."""
        self._buffers.put(state)
        if state.get("is_begun") and self.of_commit:
            # That rank died before the end of the commit. Others have what the commit has changed.
            self._buffers.put({"buffers": {}, **self.of_commit})
        if not only_buffers:
            self.load_random(state)

    def load_random(self, state: State, *, is_older: bool = False) -> None:
        """Load a rank's own state except its buffers; it is copied. `is_older` if it is that of an earlier step."""
        rng_state.apply(state["random"], self.device)
        if self._hook is not None and "hook" in state:
            self._hook.load_state_dict(cloned(state["hook"], self.device))
        if self.per_rank is not None and "per_rank" in state:
            self.per_rank.load_state_dict(cloned(state["per_rank"]), is_older=is_older)

    def whole(self, own: Mapping[str, Sequence[State]]) -> State:
        """The whole state for a checkpoint, with `random`, `per_rank` and `own_buffers` of all ranks.

        If it is in parts, only this rank's part.
        """
        state, rest = self._state(), self.rest()
        if self.is_in_parts:
            # The optimizer's state has them, by the names of the parameters.
            del rest["param_groups"]
        else:
            state["optimizer"] = self.settings.of_step(0, state["optimizer"])
        return {**state, **rest, **self._kinds(), **{name: list(its) for name, its in own.items()}}

    def _kinds(self) -> State:
        """The optimizers with their initial groups; `settings` adds those that came later."""
        kinds = kinds_of(self._wrapped, self.optimizers, by_name=self.has_names_of_its_own)
        starts = zip(kinds, self.settings.start_sizes(), strict=True)
        return {OPTIMIZERS: [[name, sizes and start] for (name, sizes), start in starts]}

    def load_whole(
        self, load: Callable[[State], Found | None], rank: int, world_size: int, *, has_buffers: bool = True
    ) -> Found | None:
        """Let `load` fill the state that `whole` or `large` returns, and load it. Returns what `load` found.

        `large` has no buffers.
        """

        def load_with_groups(state: State) -> Found | None:
            found = load(state)
            if found is not None:
                self.settings.load_groups(state)
            return found

        rest = self._kinds()
        how: Any = {"by_name": self.has_names_of_its_own, "has_buffers": has_buffers}
        found = restore(load_with_groups, self._wrapped, self.optimizers[0], rest, self._others, **how)
        if found is not None:
            self._load_rest(rest)
            # At another world size all ranks get rank 0's.
            buffers = rest.get("own_buffers", ())
            if buffers:
                self._buffers.put(buffers[rank if len(buffers) == world_size else 0])
            random = rest.get("random", ())
            if len(random) == world_size:
                rng_state.apply(random[rank], self.device)
            per_rank = rest.get("per_rank", ())
            if self.per_rank is not None and per_rank:
                # Each of them has its world size.
                self.per_rank.load_state_dict(per_rank[rank % len(per_rank)])
        return found

    def _load_rest(self, state: State) -> None:
        """Load the parts that are there; they are copied."""
        # The first `extra` may be the live `model.state_dict()`, which a program replaces by copies later.
        tensors = [part for each in (*self.model.parameters(), *self.model.buffers()) for part in local_parts(each)]
        spare = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}
        for name, part in self._rest.items():
            if name in state and len(state[name]) != len(several(part)):
                raise ValueError(
                    f"the checkpoint has {len(state[name])} of `{name}`, and this program {len(several(part))}; give "
                    "the Keeper the same, or other `checkpoints`"
                )
            if name in state:
                for one, its in zip(several(part), state[name], strict=True):
                    _load(one, its, spare)
        options = state.get("param_groups", ()) if self.is_in_parts else ()
        for one, groups in zip(self.optimizers, options, strict=False):
            for group, its in zip(one.param_groups, groups, strict=True):
                put_options(group, its)
        self.settings.load(state)


def _shares_buffers(model: Any) -> bool:
    """Whether DDP gives every rank of the job all of rank 0's buffers before each forward pass."""
    return (
        getattr(model, "broadcast_buffers", False)
        and not model.parameters_to_ignore
        and model.process_group.size() == dist.get_world_size()
    )


def _device_of(model: nn.Module) -> torch.device:
    """The GPU of the parameters, or the CPU if they are on none. Raises ValueError if they are on several GPUs."""
    gpus = {str(parameter.device): parameter.device for parameter in model.parameters() if parameter.is_cuda}
    if len(gpus) > 1:
        raise ValueError(
            f"the model's parameters are on {' and '.join(sorted(gpus))}; a Keeper copies from one GPU per process"
        )
    return next(iter(gpus.values()), torch.device("cpu"))


def _state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else part


def _parts_of(extra: Any) -> Any:
    """`extra` as objects, dictionaries and tensors. A list of anything else is one part, which may grow."""
    if type(extra) is list and not (extra and all(isinstance(one, dict) or _is_object(one) for one in extra)):
        extra = (extra,)
    for one in several(extra):
        if not (_is_object(one) or isinstance(one, dict | list | set | Tensor)):
            raise TypeError(
                f"extra has {one!r:.80} of type {type(one).__qualname__}, which a restore could not put back; give a "
                "dictionary, a list, a tensor, or an object with state_dict and load_state_dict"
            )
    return extra


def _is_object(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _load(part: Any, state: Any, spare: Collection[int]) -> None:
    """Load a part's state, which is copied; tensors in the storages in `spare` are not changed."""
    if isinstance(part, Optimizer):
        load_optimizer(part, state)
    elif isinstance(part, nn.Module):
        load_module(part, cloned(state))
    elif hasattr(part, "load_state_dict"):
        part.load_state_dict(cloned(state))
    else:
        put_into(part, state, spare=spare)
