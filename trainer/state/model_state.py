"""The state of a model and its optimizer, in the form of checkpoints and snapshots: DDP, FSDP, ZeRO-1, pipelines.

With DDP and in a single process these are plain state_dicts, the same on every rank. With FSDP (`fully_shard`, or
FSDP1) each rank has its part of each tensor, by parameter name. With a ZeroRedundancyOptimizer each rank has the state
of the parameters that it updates: a PerRank, by parameter name. A rank of a pipeline has parameters that others lack:
its weights are a PerRank too (`by_name`). All of them can be loaded at another world size.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elaunch.trainer.state.live_tensors import Buffers, plain_name
from elaunch.trainer.state.tree import OPTIMIZERS, PerRank, State, cloned, is_shard, put_into, some

Found = TypeVar("Found")
# The most passes until DDP sums gradients in its final order.
_PASSES_MAX = 2


class Models(nn.ModuleList):
    """Several models of one training as one: the names of their parameters begin with their numbers."""


def state_of(model: nn.Module, optimizer: Optimizer, *others: Optimizer, by_name: bool = False) -> State:
    """`{"model": …, "optimizer": …, "types": …}` after at least one step; the tensors are the live ones, not copies.

    `others` are further optimizers of a model with FSDP. Their states are in `optimizer` too. `by_name` is for ranks
    that have parameters of different names, as pipeline stages have. It is the same on all ranks.
    """
    _reshard(model)
    types = {"types": types_of(model), OPTIMIZERS: kinds_of(model, [optimizer, *others], by_name=by_name)}
    if by_name:
        return {**_by_name(model, [optimizer, *others]), **types}
    if is_zero(optimizer):
        return {"model": unwrap(model).state_dict(), "optimizer": _zero_state(unwrap(model), optimizer), **types}
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(model, [optimizer, *others])
        return {"model": weights, "optimizer": moments, **types}
    return {"model": unwrap(model).state_dict(), "optimizer": optimizer.state_dict(), **types}


def kinds_of(model: nn.Module, optimizers: Sequence[Any], *, by_name: bool) -> list[list[Any]]:
    """The class of each optimizer, and the sizes of its groups if its state refers to parameters by index."""
    by_number = not (by_name or is_sharded(model))
    return [
        [
            f"{type(one).__name__}{f' of {type(one.optim).__name__}' if is_zero(one) else ''}",
            [len(group["params"]) for group in getattr(one, "param_groups", ())] if by_number else None,
        ]
        for one in optimizers
    ]


def types_of(model: nn.Module) -> list[str]:
    """The parameters' types. If a checkpoint has others, the optimizer's values are cast to the parameters'."""
    return sorted({str(parameter.dtype) for parameter in model.parameters()})


def restore(
    load: Callable[[State], Found | None],
    model: nn.Module,
    optimizer: Optimizer,
    rest: State | None = None,
    others: Sequence[Optimizer] = (),
    *,
    by_name: bool = False,
    has_buffers: bool = True,
) -> Found | None:
    """Load model and optimizer with `load` (for example `Checkpoints.load_newest`). Returns what `load` found.

    Everything else in the state goes into `rest`. All ranks call it before the first step. If `load` finds nothing
    (None), nothing changes. `others` and `by_name` are those of `state_of`. The state's buffers are the model's, except
    those that `own_buffers` in it names; without `has_buffers` it has none. Raises ValueError if it does not fit.
    """
    fresh = [one for one in (optimizer, *others) if not one.state]
    # For a sharded model `state_of` creates an optimizer state to fill, by a step with lr=0.
    state = {**state_of(model, optimizer, *others, by_name=by_name), **(rest or {})}
    # A buffer may have another shape, or not exist yet.
    buffers, weights = Buffers(unwrap(model)), state["model"]
    apart = without_buffers(weights, buffers)
    owned = set(weights)
    if isinstance(weights, PerRank):
        # Empty entries request them.
        weights |= {name: {} for name in apart}
    found = load(state)
    if found is None:
        for one in fresh:
            one.state.clear()
        return None
    weights = state.pop("model")
    arrived = {plain_name(name): v for name, v in weights.items() if name not in owned and isinstance(v, Tensor)}
    # Rank 0's are those that had changed; a rank of a pipeline has only its own.
    own_buffers = state.get("own_buffers", ())
    may_differ = {name for its in (own_buffers if by_name else own_buffers[:1]) for name in its["buffers"]}
    lost = [name for name in apart if plain_name(name) not in {*arrived, *may_differ}] if has_buffers else ()
    if lost:
        raise ValueError(f"the state lacks {some(lost)}; it belongs to another model")
    put = _put_by_name if by_name else _put
    types, _ = state.pop("types", None), state.pop(OPTIMIZERS, None)
    optimizers = [optimizer, *others]
    # Other types were chosen on purpose.
    with exactly(optimizers if by_name or types in (None, types_of(model)) else ()):
        kept = {name: value for name, value in weights.items() if name in owned}
        put(model, optimizers, {**kept, **apart}, state.pop("optimizer"))
    buffers.put_arrived(arrived, may_differ)
    if rest is not None:
        rest.clear()
        rest.update(state)
    return found


def without_buffers(weights: State, buffers: Buffers) -> State:
    """Remove the persistent buffers from a model's state, and return them. Distributed ones stay."""
    names = buffers.names()
    taken = [name for name, value in weights.items() if plain_name(name) in names and not is_shard(value)]
    return {name: weights.pop(name) for name in taken}


def is_in_parts(model: nn.Module, optimizer: Any) -> bool:
    """Whether each rank has only a part of the state: of the model (FSDP) or of the optimizer (ZeRO-1)."""
    return is_sharded(model) or is_zero(optimizer)


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank has only a part of the model."""
    return is_fsdp1(model) or any(is_shard(parameter) for parameter in model.parameters())


def is_fsdp1(model: nn.Module) -> bool:
    """Whether a part of the model is in FullyShardedDataParallel, whose parameters are no DTensors."""
    fsdp1 = sys.modules.get("torch.distributed.fsdp")
    return fsdp1 is not None and any(isinstance(m, fsdp1.FullyShardedDataParallel) for m in model.modules())


def _reshard(model: nn.Module) -> None:
    """Reshard FSDP2's modules: an evaluation leaves the root's parameters unsharded, which no optimizer has."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in () if fsdp is None else model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module, or modules, without the wrappers of DistributedDataParallel and torch.compile."""
    if isinstance(model, Models):
        return Models(unwrap(one) for one in model)
    while True:
        # A compiled module has the attributes of its module, which may have a `module` of its own.
        wrapped = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}.get(type(model).__name__, "")
        inner = getattr(model, wrapped, None) if wrapped else None
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def hook_after_forward(model: nn.Module, hook: Callable[[nn.Module, object, object], None]) -> Any:
    """Run `hook` after each forward pass of `model`. Returns a handle with `remove`."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        # `model.compile()` traces hooks too. This breaks the graph before the hook.
        hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return model.register_forward_hook(hook)


def passes_to_final_sums(models: Sequence[nn.Module], world_size: int) -> int:
    """How many forward and backward passes DDP needs until it sums gradients in its final order.

    The order is that of its buckets, which it rebuilds once: before the second forward pass, under `static_graph`
    before the third (torch/nn/parallel/distributed.py, `_rebuild_buckets`), with `find_unused_parameters` alone never.
    With two ranks the order does not matter, but a communication hook may use a bucket as a whole. With `static_graph`
    the passes are needed for another reason too: the very first pass may be under `no_sync`.

    With more than two ranks, models without DDP may be inside a wrapper that was not passed. So the most passes are
    assumed then, except for FSDP, which has no such buckets.
    """
    wrappers = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if wrappers:
        return max(_passes_of(wrapper) for wrapper in wrappers)
    return 0 if world_size <= 2 or all(is_sharded(model) for model in models) else _PASSES_MAX


def _passes_of(wrapper: DistributedDataParallel) -> int:
    if wrapper.static_graph:
        # Always, since torch fails with an internal error if the very first pass is under `no_sync`.
        return _PASSES_MAX
    if wrapper.process_group.size() <= 2 and not wrapper._comm_hooks:
        return 0
    return 0 if wrapper.find_unused_parameters else 1


def moments_of(optimizer: Any) -> list[Any]:
    """Every value that the optimizer keeps for a parameter on this rank, except None."""
    states = (optimizer.optim if is_zero(optimizer) else optimizer).state.values()
    return [value for held in states for value in held.values() if value is not None]


def _put(model: nn.Module, optimizers: Sequence[Optimizer], weights: Any, moments: Any) -> None:
    optimizer = optimizers[0]
    if is_zero(optimizer):
        unwrap(model).load_state_dict(weights)
        _put_zero(unwrap(model), optimizer, moments)
    elif is_sharded(model):
        from torch.distributed.checkpoint.state_dict import set_state_dict

        _divide(model, moments["state"])
        set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)
    else:
        unwrap(model).load_state_dict(weights)
        optimizer.load_state_dict(moments)


def _divide(model: nn.Module, moments: dict[str, Any]) -> None:
    """Shard values that were loaded whole: those that the optimizer makes after its first step."""
    parameters = {plain_name(name): one for name, one in model.named_parameters()}
    for name, its in moments.items():
        parameter: Any = parameters.get(plain_name(name))
        for key, value in its.items() if hasattr(parameter, "placements") else ():
            if isinstance(value, Tensor) and not is_shard(value) and value.shape == parameter.shape:
                part: Any = torch.zeros_like(parameter.detach(), dtype=value.dtype)
                its[key] = part
                for chunk in part.__create_chunk_list__():
                    place = [slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
                    part.to_local().copy_(value[tuple(place)])


def is_zero(optimizer: Any) -> bool:
    """Whether it is a ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim")
    zero = getattr(module, "ZeroRedundancyOptimizer", None)
    return zero is not None and isinstance(optimizer, zero)


def _zero_state(model: nn.Module, zero: Any) -> State:
    """The hyperparameters, and the state of the parameters that this rank updates."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in zero.param_groups]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    local = [parameter for group in zero.optim.param_groups for parameter in group["params"]]
    held = [(names[id(parameter)], zero.optim.state.get(parameter, {})) for parameter in local]
    moments = {name: {key: value for key, value in its.items() if value is not None} for name, its in held}
    return {"param_groups": groups, "state": PerRank(moments)}


def _put_zero(model: nn.Module, zero: Any, moments: State) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    local = [names[id(parameter)] for group in zero.optim.param_groups for parameter in group["params"]]
    saved = {index: moments["state"][name] for index, name in enumerate(local) if moments["state"].get(name)}
    # The local optimizer loads each value onto the right device: a step count stays in host memory.
    zero.optim.load_state_dict({**zero.optim.state_dict(), "state": saved})
    for group, values in zip(zero.param_groups, moments["param_groups"], strict=True):
        put_options(group, values)


def _by_name(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """The weights and moments of the parameters that this rank has, by their names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = cast(tuple[Any, Any], get_state_dict(model, optimizers))
    # The names in a group differ between the ranks, and its options do not.
    groups = [{key: value for key, value in group.items() if key != "params"} for group in moments["param_groups"]]
    return {"model": PerRank(weights), "optimizer": {"state": PerRank(moments["state"]), "param_groups": groups}}


def _put_by_name(model: nn.Module, optimizers: Sequence[Optimizer], weights: Any, moments: Any) -> None:
    """Load what `_by_name` returned on ranks that had these names. Raises ValueError if some are missing."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    own_weights, own_moments = cast(tuple[Any, Any], get_state_dict(model, optimizers))
    missing = [name for name in own_weights if not isinstance(weights.get(name), Tensor)]
    kept = moments["state"]
    missing += [f"the optimizer's {name}" for name, its in own_moments["state"].items() if its and not kept.get(name)]
    if missing:
        raise ValueError(f"the state lacks {some(missing)}; it belongs to another model, or to another division of it")
    groups = [
        {**options, "params": own["params"]}
        for own, options in zip(own_moments["param_groups"], moments["param_groups"], strict=True)
    ]
    state: Any = {"state": dict(kept), "param_groups": groups}
    set_state_dict(model, optimizers, model_state_dict=dict(weights), optim_state_dict=state)


def load_optimizer(optimizer: Any, saved: State) -> None:
    """Load `saved`, bit for bit; the optimizer keeps none of its tensors."""
    theirs, ours = [
        [len(group["params"]) for group in groups]
        for groups in (saved.get("param_groups", ()), getattr(optimizer, "param_groups", ()))
    ]
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"the kept state of {type(optimizer).__name__} has groups of {some(map(str, theirs), 9)} parameters, and "
            f"this program has groups of {some(map(str, ours), 9)}; make all groups before the Keeper, and keep one "
            "at lr=0 until it is trained"
        )
    own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    with exactly([optimizer], copies=True):
        # An overridden `load_state_dict` may do anything with the tensors.
        optimizer.load_state_dict(cloned(saved) if own else saved)


@contextlib.contextmanager
def exactly(optimizers: Iterable[Any], *, copies: bool = False) -> Iterator[None]:
    """In this context `load_state_dict` of these optimizers keeps every value's type, and its groups' own objects.

    torch casts a value to its parameter's type, and puts new dictionaries and new tensors (of a learning rate) into
    `param_groups`, where a program may have the old ones. With `copies` the optimizers keep none of the given tensors:
    torch keeps a value that is on its parameter's device already.
    """
    with contextlib.ExitStack() as stack:
        for one in optimizers:
            # Wrappers have the optimizer under these names: ZeroRedundancyOptimizer, Accelerate's.
            for each in (one, getattr(one, "optim", None), getattr(one, "optimizer", None)):
                # Some subclasses never call `Optimizer.__init__`, and take no hooks.
                if isinstance(each, Optimizer) and "_optimizer_load_state_dict_pre_hooks" in vars(each):
                    load = _Load(copies)
                    stack.callback(each.register_load_state_dict_pre_hook(load.begin).remove)
                    # Before hooks of the program, which may change values on purpose.
                    stack.callback(each.register_load_state_dict_post_hook(load.end, prepend=True).remove)
        yield


class _Load:
    """One optimizer's `load_state_dict`: what it was given, and what it had."""

    def __init__(self, copies: bool) -> None:
        self._copies = copies

    def begin(self, optimizer: Optimizer, saved: State) -> None:
        self._saved, self._groups = saved, optimizer.param_groups

    def end(self, optimizer: Optimizer) -> None:
        rest = dict(self._saved["state"])
        for group, its in zip(optimizer.param_groups, self._saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], its["params"], strict=True):
                if number in rest:
                    optimizer.state[parameter] = self._own(optimizer.state[parameter], rest.pop(number))
        for key, value in rest.items() if self._copies else ():
            optimizer.state[key] = cloned(value)
        for group, loaded in zip(self._groups, optimizer.param_groups, strict=True):
            if group is not loaded:
                put_options(group, loaded)
        # As torch does it: a wrapper may have a property of that name.
        vars(optimizer)["param_groups"] = self._groups

    def _own(self, loaded: Any, saved: Any) -> Any:
        """`loaded` with the types of `saved`, and with `copies` without its memory."""
        if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
            is_shared = self._copies and loaded.device == saved.device and loaded.data_ptr() == saved.data_ptr()
            if is_shared or loaded.dtype != saved.dtype:
                return saved.to(loaded.device, copy=self._copies)
        elif isinstance(loaded, dict) and isinstance(saved, dict):
            for key in loaded:
                loaded[key] = self._own(loaded[key], saved.get(key))
        elif type(loaded) in (list, tuple) and type(saved) in (list, tuple) and len(loaded) == len(saved):
            return type(loaded)(map(self._own, loaded, saved))
        return loaded


def put_options(group: dict[str, Any], saved: State) -> None:
    """Set the options of a parameter group to `saved`. A tensor among them (a learning rate) stays the object."""
    for key, value in saved.items():
        if key != "params":
            group[key] = put_into(group.get(key), value)


def require_uncaptured(optimizer: Any) -> None:
    """Raise ValueError if a CUDA graph may hold the optimizer's state: a restore replaces its tensors."""
    groups, state = getattr(optimizer, "param_groups", ()), getattr(optimizer, "state", None)
    if state and any(group.get("capturable") for group in groups) and has_cuda_graphs():
        raise ValueError(
            f"{type(optimizer).__name__} has capturable=True and a state, and this process has CUDA graphs: a graph "
            "that holds that state would still use it after a restore, and not the restored one; enter the "
            "Keeper first, then warm up and capture, and put graph.replay() into `with keeper.commit():`"
        )


def has_cuda_graphs() -> bool:
    """Whether this process has captured a CUDA graph that it still has. torch has no list of them."""
    return any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())
