"""The live tensors of a training's state: parameters, optimizer states and buffers.

Buffers differ between ranks, and some are made, replaced or resized during training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn, strided

from elaunch.trainer.state.packing import NotPlain, require_dense
from elaunch.trainer.state.tree import State, cloned, is_shard, local_parts, put_into, some, tensors_in

# The wrappers' names for their module, which not every state_dict has in its keys.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# A buffer's type and shape; None if there is none.
_Kind = tuple[torch.dtype, torch.Size] | None


class LiveTensors:
    """Parameters, and the tensors in the optimizers' states and in `extra`. Buffers are not included.

    A distributed tensor is listed itself, since it has torch's version counter, and with its local part, which has the
    storage. A module in `extra` is listed by its parameters, another object with a `state_dict` not at all. Inference
    tensors have no version counter: `seen` omits them.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], extra: Sequence[Any]) -> None:
        self._modules = {"": model}
        self._modules |= {f"extra.{n}.": one for n, one in enumerate(extra) if isinstance(one, nn.Module)}
        self.parameters = [parameter for module in self._modules.values() for parameter in module.parameters()]
        self._are_plain = all(type(parameter) is nn.Parameter for parameter in self.parameters)
        # A ZeroRedundancyOptimizer has the state of this rank's parameters in another optimizer.
        inner = [getattr(one, "optim", one) for one in optimizers]
        # Other optimizers need only a `state_dict`.
        self._optimizers = [one for one in inner if isinstance(getattr(one, "state", None), dict)]
        self._nests = [one for one in extra if isinstance(one, dict | list | tuple | Tensor)]
        # The types of tensors that `require_dense` has accepted.
        self._kinds: set[type] = set()

    def seen(self, *, optimizers: bool) -> list[Tensor]:
        """All in a fixed order, those of the optimizers, which are most, only with `optimizers`."""
        found: list[Tensor] = (
            [*self.parameters] if self._are_plain else [part for one in self.parameters for part in _parts(one)]
        )
        for nest in self._nests:
            found += [part for _, value in tensors_in(nest) if not value.is_inference() for part in _parts(value)]
        states = chain.from_iterable(one.state.values() for one in self._optimizers) if optimizers else ()
        values = [value for its in states if type(its) is dict for value in its.values() if isinstance(value, Tensor)]
        found += [part for value in values for part in _parts(value) if not value.is_inference()]
        return found

    def require_dense(self, *, quickly: bool = False) -> None:
        """Raise NotPlain with the name of the first tensor that cannot be kept; `quickly` trusts types seen before."""
        seen = self.seen(optimizers=True)
        kinds = set(map(type, seen))
        if quickly and kinds <= self._kinds and all(each.layout is strided for each in seen):
            return
        for name, tensor in self.named():
            try:
                for part in local_parts(tensor) if is_shard(tensor) else [tensor]:
                    require_dense(part)
            except NotPlain as error:
                raise NotPlain(f"`{name}` cannot be kept: {error}") from None
        for one in self._optimizers:
            for parameter, its in one.state.items():
                shapes = [part.shape for part in local_parts(parameter)] if is_shard(parameter) else []
                for value in its.values() if shapes and type(its) is dict and parameter.shape not in shapes else ():
                    if isinstance(value, Tensor) and not is_shard(value) and value.shape in shapes:
                        raise NotPlain(
                            f"`{self.name_of(value)}` cannot be kept: it has the shape of this rank's part of the "
                            f"parameter, {tuple(value.shape)}, and is no DTensor, so a restart would give all ranks "
                            "rank 0's; make it with torch.zeros_like(parameter), or by DTensor.from_local"
                        )
        self._kinds |= kinds

    def states(self) -> list[tuple[int, int]]:
        """The identities and lengths of the optimizers' states: loading one replaces it."""
        return [(id(one.state), len(one.state)) for one in self._optimizers]

    def named(self, *, optimizers: bool = True) -> Iterator[tuple[str, Tensor]]:
        """All with a readable name, the same on every rank; of distributed ones not the parts."""
        names: dict[int, str] = {}
        for prefix, module in self._modules.items():
            for name, parameter in module.named_parameters(prefix.rstrip(".")):
                names.setdefault(id(parameter), name)
                yield name, parameter
        for number, one in enumerate(self._optimizers if optimizers else ()):
            whose = "the optimizer" if len(self._optimizers) == 1 else f"optimizer {number}"
            for parameter, its in one.state.items():
                for key, value in its.items() if type(its) is dict else ():
                    if isinstance(value, Tensor):
                        yield f"{names.get(id(parameter), parameter)!s:.200}: {key} of {whose}", value
        for number, nest in enumerate(self._nests):
            yield from tensors_in(nest, f"extra.{number}")

    def name_of(self, tensor: Tensor) -> str:
        """The name of such a tensor; "" for one that no longer exists."""
        return next((name for name, value in self.named() if any(part is tensor for part in _parts(value))), "")


def _parts(tensor: Any) -> list[Tensor]:
    """The tensor, and the local part of a distributed one."""
    local = getattr(tensor, "_local_tensor", None)
    return [tensor] if local is None else [tensor, local]


class Buffers:
    """The buffers of `model`: the persistent ones, and the others from their first change on.

    A constant one (a mask, a table of positions) is made again by the program.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._device = device
        self._owners = [(_dotted(name), owner) for name, owner in model.named_modules()]
        self._by_prefix = dict(self._owners)
        self._with: list[tuple[str, nn.Module]] = []
        self._without = [owner._buffers for _, owner in self._owners]
        # A module that is in several places has several names, of which the first counts.
        first = {id(owner): prefix for prefix, owner in self._owners}
        places = model.named_modules(remove_duplicate=False)
        self._first_prefix = {_dotted(name): first[id(owner)] for name, owner in places}
        self._given = {name: _kind(value) for name, value, persists in self._named() if persists}
        self._changed: set[str] = set()
        self._noted: dict[str, tuple[Tensor | None, int]] = {}
        self.note()

    def note(self) -> None:
        """Count changes of non-persistent buffers from now on."""
        self._noted = {
            name: (value, _version(value))
            for name, value, persists in self._named()
            if not persists and name not in self._changed
        }

    def now(self, *, all_of_them: bool = False) -> State:
        """The live tensors by name: `buffers`, and as `transient` the non-persistent ones that have changed.

        None stands for one that existed at the start or has changed, and does not exist now.
        """
        kept: dict[str, Tensor | None] = {}
        transient: dict[str, Tensor | None] = {}
        # Without a generator, since this runs in each step.
        for prefix, owner in self._with_buffers():
            loose = owner._non_persistent_buffers_set
            for short, value in owner._buffers.items():
                name = prefix + short
                if short not in loose:
                    if value is not None or all_of_them or self._given.get(name):
                        kept[name] = value
                elif all_of_them or name in self._changed or self._has_changed(name, value):
                    transient[name] = value
        return {"buffers": kept, "transient": transient}

    def put(self, state: State, *, all_of_them: bool = False) -> None:
        """Copy what `now` returned into the model. With `all_of_them` remove other buffers.

        Raises ValueError for a buffer of a module that the model does not have.
        """
        known: dict[int, tuple[Any, Any]] = {}
        given = {**state.get("transient", {}), **state["buffers"]}
        if lost := [name for name in given if _prefix(name) not in self._by_prefix]:
            raise ValueError(f"the state has the buffer {some(lost)}, and the model has no such module")
        for name, saved in given.items():
            owner, short = self._by_prefix[_prefix(name)], name.rpartition(".")[2]
            there = owner._buffers.get(short)
            value = put_into(there, saved, known)
            if value is not None and there is None and self._device is not None:
                value = value.to(self._device)
            if short not in owner._buffers:
                # The program would have had to remove an attribute of that name too.
                owner.__dict__.pop(short, None)
                owner.register_buffer(short, value, persistent=name in state["buffers"])
            elif value is not there:
                setattr(owner, short, value)
        self._changed |= set() if all_of_them else set(state.get("transient", ()))
        for name, _, _ in [*self._named()] if all_of_them else ():
            if name not in given:
                del self._by_prefix[_prefix(name)]._buffers[name.rpartition(".")[2]]

    def names(self) -> set[str]:
        """The names of all persistent buffers, as `plain_name` makes them; a shared module's under all its names."""
        owners = [(prefix, self._by_prefix[first]) for prefix, first in self._first_prefix.items()]
        return {
            prefix + short
            for prefix, owner in owners
            for short in owner._buffers
            if short not in owner._non_persistent_buffers_set
        }

    def mismatched(self) -> dict[str, Tensor | None]:
        """The persistent buffers whose type or shape has changed since the start, or that were added or removed."""
        now = self.now()
        held, kept = {**now["buffers"], **now["transient"]}, now["buffers"]
        gone = {name: None for name, kind in self._given.items() if kind and name not in held}
        return gone | {name: value for name, value in kept.items() if _kind(value) != self._given.get(name)}

    def put_arrived(self, arrived: Mapping[str, Tensor], may_differ: Collection[str]) -> None:
        """Put a checkpoint's buffers into the model; those in `may_differ` were `mismatched` when it was written.

        Raises ValueError if another one does not fit the model.
        """
        fitting: dict[str, Tensor] = {}
        for place, value in arrived.items():
            prefix = _prefix(place)
            name = self._first_prefix.get(prefix, prefix) + place[len(prefix) :]
            there = self._given.get(name)
            if name not in may_differ and (there is None or there[1] != value.shape):
                here = f"it has shape {tuple(there[1])}" if there else "there is no such buffer"
                raise ValueError(
                    f"the checkpoint holds {name} of shape {tuple(value.shape)}, and in the model {here}; it is of "
                    "another model"
                )
            fitting[name] = value if there is None or name in may_differ else value.to(there[0])
        self.put({"buffers": fitting})

    def _named(self) -> Iterator[tuple[str, Tensor | None, bool]]:
        """Each buffer that is registered: its name, its value, and whether it is persistent."""
        for prefix, owner in self._with_buffers():
            for short, value in owner._buffers.items():
                yield prefix + short, value, short not in owner._non_persistent_buffers_set

    def _with_buffers(self) -> list[tuple[str, nn.Module]]:
        """The modules that have buffers. Most never have any, so the others are checked together."""
        if any(self._without):
            self._with = [pair for pair in self._owners if pair[1]._buffers]
            self._without = [owner._buffers for _, owner in self._owners if not owner._buffers]
        return self._with

    def _has_changed(self, name: str, value: Tensor | None) -> bool:
        before, version = self._noted.get(name, (None, -1))
        if value is before and version == _version(value):
            return False
        self._changed.add(name)
        self._noted.pop(name, None)
        return True


def load_module(module: nn.Module, state: State) -> None:
    """Load a module's state_dict, whose buffers may have another shape here, or not exist here."""
    there = module.state_dict()
    others = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and (name not in there or there[name].shape != value.shape)
    }
    buffers = Buffers(module)
    known = {plain_name(name) for name, _ in module.named_parameters()}
    buffers.put({"buffers": {name: value for name, value in others.items() if plain_name(name) not in known}})
    module.load_state_dict(state)


def versions(state: State) -> dict[str, Any]:
    """A value for each buffer of `Buffers.now`, by name, that differs once it was changed or replaced."""
    held = {**state["buffers"], **state["transient"]}
    return {name: None if value is None else (_place(value), _version(value)) for name, value in held.items()}


def changed_since(before: Mapping[str, Any], state: State) -> State:
    """Copies of the buffers of `Buffers.now` that have changed since `versions` was `before`."""
    now = versions(state)
    names = {name for name in now if name not in before or now[name] != before[name]}
    changed: State = cloned({part: {n: v for n, v in its.items() if n in names} for part, its in state.items()})
    return changed if names else {}


def plain_name(name: str) -> str:
    """A name in a state_dict, or of a module, without the wrappers of compiling, FSDP1 and checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _dotted(name: str) -> str:
    return f"{name}." if (name := plain_name(name)) else ""


def _prefix(name: str) -> str:
    return name[: name.rfind(".") + 1]


def _kind(value: Tensor | None) -> _Kind:
    return None if value is None else (value.dtype, value.shape)


def _place(value: Tensor) -> int:
    return value.data_ptr() if value.layout == torch.strided else id(value)


def _version(value: Tensor | None) -> int:
    return -1 if value is None or value.is_inference() else value._version
