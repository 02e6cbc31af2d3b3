"""`elaunch rehearse` in a worker: records the state of each step, kills at a chosen moment, stops at the last step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from inspect import CO_OPTIMIZED
from itertools import chain, islice
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.state.model_state import hook_after_forward
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import State, digests, local_parts, tensors_in, tensors_sha256

# Set by the command. JSON: the `folder` of the records, the number of `steps`, and when to kill which process.
VARIABLE = "ELAUNCH_REHEARSAL"
# How far the program's own variables are followed. What is larger is data.
_DEPTH, _ITEMS_MAX, _NAMES_MAX, _BYTES_MAX = 6, 1000, 5000, 1 << 26
_SHOWN_CHARS, _HASHED_BYTES_MAX = 40, 1 << 20


class Rehearsal:
    """The records of one rank and one Keeper; `kept` are the objects that it keeps."""

    def __init__(self, environ: Mapping[str, str], place: RankInfo, name: str, kept: Mapping[str, Any]) -> None:
        self._asked, self._kept = json.loads(environ[VARIABLE]), [*kept.values()]
        self._rank = place.rank
        self._dies = not place.generation and name == self._asked["name"] and place.rank in self._asked["ranks"]
        self._folder, self._name = Path(self._asked["folder"]), name
        self._step, self._warned = 0, list[str]()
        self._begin_record(is_after_step=True)

    def _begin_record(self, *, is_after_step: bool = False) -> None:
        self._is_after_step, self._losses = is_after_step, list[str]()
        self._seen: dict[str, Any] = defaultdict(hashlib.sha256)

    def checkpoints(self, given: Any, every: int) -> tuple[Any, int]:
        """Where checkpoints go instead, and how often: so that a new agent finds one."""
        return given and self._folder / f"checkpoints-{self._name}", min(every, max(1, self._asked["steps"] // 4))

    def warn(self, say: Callable[[str], object], text: str) -> None:
        """The Keeper names state that it does not keep."""
        self._warned.append(text)
        say(text)

    def attach(self, training: Training, stack: ExitStack) -> None:
        """The state is restored: watch the passes until `stack` is left."""
        self._training = training
        for model in training.models:
            # A program may evaluate what is in the wrapper.
            inner = getattr(model, "module", model)
            stack.callback(inner.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
            stack.callback(hook_after_forward(inner, self._after_forward).remove)
        original: Any = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._losses += [
                repr(each.tolist()) if each.numel() == 1 else digest(each) for each in tensors_in([tensors])
            ]
            original(tensors, *args, **kwargs)
            self._die("backward")

        stack.callback(setattr, torch.autograd, "backward", original)
        torch.autograd.backward = backward

    def begin(self, step: int) -> bool:
        """Record the state with which `step` begins, and what the program has done since the step before.

        Returns whether the program ends here.
        """
        self._step, training = step, self._training
        own = training.own(large=True)
        # DDP overwrites those of the other ranks.
        is_overwritten = training.shares_buffers and self._rank
        buffers: State = {"transient": {}, "buffers": {}} if is_overwritten else training.buffers()
        rest = {**training.small(), "random": own["random"], "hook": own.get("hook")}
        # An evaluation that was cut off leaves other modes, until the step sets them.
        rest.get("settings", {}).pop("evaluating", None)
        facts: dict[str, Any] = {"the loss": " + ".join(self._losses)} if self._losses else {}
        facts |= {name: f"done {its.hexdigest()[:16]}" for name, its in self._seen.items()}
        facts |= {**dict(training.live_tensors.named()), **buffers["transient"], **buffers["buffers"]}
        facts |= dict(named("", rest))
        values = {name: digest(its) for name, its in facts.items() if its is not None} | self._own(own)
        record = {"step": step, "pid": os.getpid(), "warned": self._warned, "facts": values}
        with (self._folder / f"{self._name}.{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._warned = []
        self._begin_record()
        return step > int(self._asked["steps"])

    def _own(self, own: Mapping[str, Any]) -> dict[str, str]:
        """What the program has beside its state, which may be the reason of a difference."""
        several = [each for one in self._kept if isinstance(one, list | tuple) for each in one]
        modules = [module for one in self._training.models for module in one.modules()]
        kept = frozenset(map(id, [*self._kept, *several, *modules]))
        frames = variables(sys._getframe(1))
        found = chain(named("per_rank", own.get("per_rank")), *(named(name, its, kept) for name, its in frames))
        digested: dict[str, str] = {}
        # Attributes of the program's objects may raise anything.
        with suppress(Exception):
            for name, its in islice(found, _NAMES_MAX):
                digested[f"~{name}"] = digest(its)
        return digested

    def committing(self) -> None:
        """All changes of the step are made, and the commit has not ended."""
        self._die("commit")

    def committed(self) -> None:
        """The step is complete."""
        self._is_after_step = True

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        self._note(module, [args, kwargs])

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if not module.training:
            self._note(module, outputs)
            self._die("evaluation")

    def _note(self, module: nn.Module, values: object) -> None:
        name = "the evaluation after it" if self._is_after_step else "the evaluation"
        parts = [part for each in tensors_in(values) for part in local_parts(each)]
        self._seen["the samples" if module.training else name].update(tensors_sha256(parts).encode())

    def _die(self, at: str) -> None:
        if self._dies and at == self._asked["at"] and self._step >= self._asked["step"]:
            agent = int((self._folder / "agent.pid").read_text())
            os.kill(agent if self._asked["agent"] else os.getpid(), signal.SIGKILL)


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
