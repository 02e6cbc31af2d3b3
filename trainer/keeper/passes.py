"""The moment in a backward pass when what a rank has drawn and fetched for a step is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from elaunch.trainer.state.model_state import hook_after_forward, unwrap


def hook_backward(
    model: nn.Module, store: Callable[[], object], at_end: Callable[[], object] = tuple
) -> Callable[[], None]:
    """Let `store` run in each training backward pass, before any other rank can complete the step without this one.

    That is when the pass reaches what the forward pass of `model` returned: the loss is computed, and no gradient of
    `model` has been reduced. If no gradient reaches that, `store` runs after the forward pass. If parts of `model` are
    called past the wrapper, it runs when the gradient of the first parameter is there, which is the last to be reduced.
    Else `at_end` runs then: gradient checkpointing has run all forward passes once more, which may change buffers.
    Returns a function that takes the hooks back.
    """
    is_stored, inner = False, unwrap(model)

    def reached(_: Tensor) -> None:
        nonlocal is_stored
        is_stored = True
        store()

    def after_forward(module: nn.Module, inputs: object, outputs: object) -> None:
        if not inner.training:
            return
        if found := [tensor for tensor in _tensors(outputs) if tensor.grad_fn is not None]:
            if len(found) == 1:
                # A hook for several takes several times as long.
                found[0].register_hook(reached)  # type: ignore[no-untyped-call]
            else:
                register_multi_grad_hook(found, reached, mode="any")
        else:
            store()

    def at_first_parameter(_: Tensor) -> None:
        nonlocal is_stored
        (at_end if is_stored else store)()
        is_stored = False

    handles: list[Any] = [hook_after_forward(model, after_forward)]
    first = next((one for one in model.parameters() if one.requires_grad), None)
    if first is not None:
        handles.append(first.register_hook(at_first_parameter))  # type: ignore[no-untyped-call]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in what a forward pass returned: DDP finds those in dictionaries, sequences and dataclasses too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])
