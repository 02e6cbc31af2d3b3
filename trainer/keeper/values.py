"""The values that a program's variables and objects lead to, and their digests: for the door and for a rehearsal."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from elaunch.trainer.state.tree import digests, local_parts, tensors_sha256

# How far the program's own variables are followed. What is larger is data.
_DEPTH, _ITEMS_MAX, _BYTES_MAX = 6, 1000, 1 << 26
_SHOWN_CHARS, _HASHED_BYTES_MAX = 40, 1 << 20


def variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the program's own functions that call, by names that are in its source."""
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
    """Tensors, generators and plain values in `value` by their paths. With `kept` those in objects too, less these."""
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
            # An attribute that has not changed may be that of the class.
            numbers = {name: its for name, its in vars(type(value)).items() if isinstance(its, int | float)}
            own = value.state_dict() if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
            items = (numbers | own).items()
        for key, item in islice(items, _ITEMS_MAX):
            yield from named(f"{path}.{key}".lstrip("."), item, kept, depth - 1)


def generator_state(value: Any) -> Tensor | str | None:
    """The present state of a generator of torch, numpy or Python; None of another object."""
    if type(value).__module__.partition(".")[0] not in ("torch", "numpy", "random"):
        return None
    ask = getattr(value, "get_state", None) or getattr(value, "getstate", None)
    if not ask and not hasattr(value, "bit_generator"):
        return None
    try:
        state = ask() if ask else value.bit_generator.state
    except NotImplementedError:
        # The system's generator has none.
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
