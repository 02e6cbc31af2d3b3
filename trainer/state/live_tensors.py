"""The tensors of a training's state as they are now: quickly, or with their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn, strided

from elaunch.trainer.state.packing import NotPlain, require_dense
from elaunch.trainer.state.tree import is_shard, local_parts, tensors_in


class LiveTensors:
    """Parameters, and the tensors in the optimizers' states and in `extra`. Buffers are no part of it.

    A distributed tensor counts itself, which torch's count of changes is of, and with its part on this rank, which has
    the storage. Of a module in `extra` the parameters count, of an object with another `state_dict` nothing. Of
    inference tensors torch counts no changes: they are not seen.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], extra: Sequence[Any]) -> None:
        self._modules = {"": model}
        self._modules |= {f"extra.{n}.": one for n, one in enumerate(extra) if isinstance(one, nn.Module)}
        self._parameters = [parameter for module in self._modules.values() for parameter in module.parameters()]
        self._are_plain = all(type(parameter) is nn.Parameter for parameter in self._parameters)
        # A ZeroRedundancyOptimizer has the state of this rank's parameters in another optimizer.
        inner = [getattr(one, "optim", one) for one in optimizers]
        # Other optimizers need only a `state_dict`.
        self._optimizers = [one for one in inner if isinstance(getattr(one, "state", None), dict)]
        self._nests = [one for one in extra if isinstance(one, dict | list | tuple | Tensor)]

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters, of modules in `extra` too."""
        return self._parameters

    def seen(self, *, optimizers: bool) -> list[Tensor]:
        """All of them in the same order each time, those of `optimizers` if that is wanted: they are most of them."""
        found: list[Tensor] = (
            [*self._parameters] if self._are_plain else [part for one in self._parameters for part in _parts(one)]
        )
        for nest in self._nests:
            found += [part for _, value in tensors_in(nest) if not value.is_inference() for part in _parts(value)]
        states = chain.from_iterable(one.state.values() for one in self._optimizers) if optimizers else ()
        values = [value for its in states if type(its) is dict for value in its.values() if isinstance(value, Tensor)]
        found += [part for value in values for part in _parts(value) if not value.is_inference()]
        return found

    def require_dense(self, *, quickly: bool = False) -> None:
        """Raise NotPlain with the name of the first tensor that cannot be kept; `quickly` checks only their layouts."""
        if quickly and all(each.layout is strided for each in self.seen(optimizers=True)):
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

    def states(self) -> list[tuple[int, int]]:
        """The identities and lengths of the optimizers' states: loading one replaces it."""
        return [(id(one.state), len(one.state)) for one in self._optimizers]

    def named(self, *, optimizers: bool = True) -> Iterator[tuple[str, Tensor]]:
        """All of them with a name for people, which is the same on every rank. Distributed ones are not replaced."""
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
        """The name of one of them; "" for a tensor that is not there any more."""
        return next((name for name, value in self.named() if any(part is tensor for part in _parts(value))), "")


def _parts(tensor: Any) -> list[Tensor]:
    """The tensor, and of a distributed one its part on this rank."""
    local = getattr(tensor, "_local_tensor", None)
    return [tensor] if local is None else [tensor, local]
