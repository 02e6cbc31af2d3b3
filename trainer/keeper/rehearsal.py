"""The part of `elaunch rehearse` in a worker: records the state of each step, dies at a moment, ends in good time."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.state.digests import digests
from elaunch.trainer.state.model_state import hook_after_forward
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import local_parts, tensors_in, tensors_sha256

# Set by the command. JSON: the `folder` of the records, `steps` until the end, and the moment at which to die.
VARIABLE = "ELAUNCH_REHEARSAL"
# How far the program's own variables are followed. What is larger is data.
_DEPTH, _ITEMS_MAX, _NAMES_MAX, _BYTES_MAX = 6, 1000, 5000, 1 << 26
_SHOWN_CHARS, _HASHED_BYTES_MAX = 40, 1 << 20


class Rehearsal:
    """The records of one rank and one Keeper; `kept` are the objects that it keeps."""

    def __init__(self, environ: Mapping[str, str], place: RankInfo, name: str, kept: tuple[object, ...]) -> None:
        self._asked, self._kept = json.loads(environ[VARIABLE]), kept
        self._dies = not place.generation and name == self._asked["name"] and place.rank in self._asked["ranks"]
        self._folder, self._name = Path(self._asked["folder"]), name
        self._path = self._folder / f"{name}.{place.rank}.jsonl"
        self._step = 0
        self._losses: list[str] = []
        self._seen = {"samples": hashlib.sha256(), "evaluation": hashlib.sha256()}
        self._passes = {"backward": 0, "evaluation": 0}

    def checkpoints(self, given: Any, every: int) -> tuple[Any, int]:
        """Where checkpoints go instead, and how often: so that a new agent finds one."""
        return given and self._folder / f"checkpoints-{self._name}", min(every, max(1, self._asked["steps"] // 4))

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
            self._losses += [_number(each) for each in tensors_in([tensors])]
            original(tensors, *args, **kwargs)
            self._passed("backward")

        stack.callback(setattr, torch.autograd, "backward", original)
        torch.autograd.backward = backward

    def begin(self, step: int) -> bool:
        """Record the state with which `step` begins, and what else the program has. Returns whether it ends here."""
        self._step = step
        training, model = self._training, self._training.model
        own = training.own(large=True)
        rest = {**training.small(), "random": own["random"], "hook": own.get("hook")}
        # An evaluation that was cut off leaves other modes, until the step sets them.
        rest.get("settings", {}).pop("evaluating", None)
        now = training.buffers()
        buffers = {name: its for name, its in {**now["transient"], **now["buffers"]}.items() if its is not None}
        state = {**dict(training.live_tensors.named()), **buffers, **dict(_named("", rest))}
        others = dict(_named("per_rank", own.get("per_rank")))
        others |= {f"training of {name or 'the model'}": str(its.training) for name, its in model.named_modules()}
        others |= {f"requires_grad of {name}": str(its.requires_grad) for name, its in model.named_parameters()}
        others |= {f"gradient of {name}": its.grad for name, its in model.named_parameters() if its.grad is not None}
        others |= {f"buffer {name}": its for name, its in model.named_buffers() if name not in buffers}
        several = [each for one in self._kept for each in (one if isinstance(one, list | tuple) else [])]
        modules = [module for one in training.models for module in one.modules()]
        kept = frozenset(map(id, [*self._kept, *several, *modules]))
        others |= dict(islice(_variables(sys._getframe(1), kept), _NAMES_MAX))
        said = {
            name: {key: _digest(value) for key, value in its.items()}
            for name, its in (("state", state), ("others", others))
        }
        self._write("begin", "evaluation", **said)
        return step > int(self._asked["steps"])

    def committing(self) -> None:
        """All changes of the step are made, and the commit has not ended."""
        self._die("commit", 1)

    def committed(self) -> None:
        """Record what the step was computed from."""
        self._write("done", "samples", losses=self._losses, passes=self._passes.pop("backward"))
        self._losses, self._passes["backward"] = [], 0
        self._step += 1

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        self._note("samples" if module.training else "evaluation", [args, kwargs])

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if not module.training:
            self._note("evaluation", outputs)
            self._passed("evaluation")

    def _note(self, which: str, values: object) -> None:
        parts = [part for each in tensors_in(values) for part in local_parts(each)]
        self._seen[which].update(tensors_sha256(parts).encode())

    def _passed(self, which: str) -> None:
        self._passes[which] += 1
        self._die(which, self._passes[which])

    def _die(self, at: str, nth: int) -> None:
        if self._dies and [at, self._step, nth] == self._asked["moment"]:
            agent = int((self._folder / "agent.pid").read_text())
            os.kill(agent if self._asked["agent"] else os.getpid(), signal.SIGKILL)

    def _write(self, kind: str, seen: str, **facts: object) -> None:
        facts |= {"kind": kind, "step": self._step, "pid": os.getpid(), seen: self._seen[seen].hexdigest()[:16]}
        if seen == "evaluation":
            facts["passes"], self._passes[seen] = self._passes[seen], 0
        self._seen[seen] = hashlib.sha256()
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the program's own functions that call, by names that are in its source."""
    while frame is not None:
        module, path = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        if (
            not module.startswith("elaunch.")
            and "site-packages" not in path
            and not path.startswith(("<", sys.base_prefix))
        ):
            yield from [(name, value) for name, value in [*frame.f_locals.items()] if name[:2] != "__"]
        frame = frame.f_back


def _variables(frame: FrameType | None, kept: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """What `variables` have in them."""
    for variable, value in variables(frame):
        for name, its in _named(variable, value, kept):
            if not isinstance(its, Tensor) or its.nbytes < _BYTES_MAX:
                yield name, its


def _named(path: str, value: Any, kept: frozenset[int] | None = None, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Tensors, generators and plain values in `value` by their paths. With `kept` those in objects too, less these."""
    library = type(value).__module__.partition(".")[0]
    ask = getattr(value, "get_state", None) or getattr(value, "getstate", None)
    if isinstance(value, Tensor):
        yield path, value
    elif library in ("torch", "numpy", "random") and (ask or hasattr(value, "bit_generator")):
        state = ask() if ask else value.bit_generator.state
        yield f"generator `{path}`", state if isinstance(state, Tensor) else repr(state)
    elif library == "numpy" and getattr(value, "nbytes", _BYTES_MAX) < _BYTES_MAX:
        yield path, value.tobytes().hex()
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield path, repr(value)
    elif depth and library != "elaunch" and id(value) not in (kept or ()):
        items: Any = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list | tuple):
            items = enumerate(value)
        elif kept is not None and not isinstance(value, dict | ModuleType | FunctionType | type):
            items = (value.state_dict() if isinstance(value, nn.Module) else getattr(value, "__dict__", {})).items()
        for key, item in islice(items, _ITEMS_MAX):
            yield from _named(f"{path}.{key}".lstrip("."), item, kept, depth - 1)


def _digest(value: Any) -> str:
    """What is compared of a value; a short one as it is."""
    if isinstance(value, Tensor):
        return "; ".join(f"{str(part.dtype)[6:]}{[*part.shape]} {_bits(part)}" for part in local_parts(value))
    return value if len(value) <= _SHOWN_CHARS else "… " + hashlib.sha256(value.encode()).hexdigest()[:16]


def _bits(part: Tensor) -> str:
    # A sum is fast, but a generator that counts one number up and another one down keeps its sum.
    return f"{digests({'': part})['']:x}" if part.nbytes > _HASHED_BYTES_MAX else tensors_sha256([part])[:16]


def _number(loss: Tensor) -> str:
    return repr(float(loss.detach())) if loss.numel() == 1 else tensors_sha256(local_parts(loss))[:16]


def _contents(path: Path) -> dict[str, str]:
    try:
        held = {"": torch.load(path, map_location="cpu", weights_only=True)}
    except Exception:  # whatever torch raises for a file that is nothing of its own
        return {"bytes": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {name: _digest(value) for name, value in _named("", held)}


if __name__ == "__main__":
    # The command names what differs in two files of a script without a Keeper.
    one, other = (_contents(Path(name)) for name in sys.argv[1:])
    print(json.dumps([name for name in {**one, **other} if one.get(name) != other.get(name)]))
