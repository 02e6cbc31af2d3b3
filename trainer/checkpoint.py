"""Checkpoints on disk: one file per (generation, step), of which the newest whole one by that order wins.

The order fences: what a group that should be gone still writes is older than anything of the group that replaced it,
however far it got. A file is a plain `torch.save` of a dictionary, with the SHA-256 of its tensors inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.files import write_durably

KEPT = 3
_NAME = re.compile(r"generation-(\d+)-step-(\d+)\.pt")

State = dict[str, Any]


@dataclass(frozen=True, order=True)
class Mark:
    """What names a checkpoint, and orders them."""

    generation: int
    step: int

    @property
    def file_name(self) -> str:
        return f"generation-{self.generation:04d}-step-{self.step:08d}.pt"

    @classmethod
    def of(cls, path: Path) -> Mark | None:
        """The mark in a file's name; None where the file is no checkpoint."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), int(match[2])) if match else None


def marks(directory: Path) -> list[Mark]:
    """All checkpoints in `directory`, whole or not, oldest first."""
    return sorted(mark for path in directory.iterdir() if (mark := Mark.of(path)))


def fencing_generation(directory: Path, generation: int) -> int:
    """The generation to save under: this group's, but never below one already there.

    A job that is started anew on an old directory counts generations from the beginning again; its checkpoints must
    still be the newest.
    """
    return max([generation, *(mark.generation for mark in marks(directory))])


def save(directory: Path, mark: Mark, state: State) -> Path:
    """Write `state` durably, then delete all but the `KEPT` newest; raises OSError, with the older ones untouched."""
    content = io.BytesIO()
    torch.save({**state, "sha256": tensors_sha256(_tensors(state))}, content)
    path = directory / mark.file_name
    write_durably(path, content.getvalue())
    for old in marks(directory)[:-KEPT]:
        with contextlib.suppress(OSError):
            (directory / old.file_name).unlink()
    return path


def load_newest(directory: Path, say: Callable[[str], None]) -> bytes:
    """The content of the newest whole checkpoint, for `unpack`; empty where there is none.

    A torn or corrupt one is named through `say`, renamed out of the way and passed over.
    """
    for mark in reversed(marks(directory)):
        path = directory / mark.file_name
        try:
            content = path.read_bytes()
            _verify(unpack(content, torch.device("cpu")), mark)
        # The bytes choose what unpickling and unzipping raise; whatever it is, the file is of no use.
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            say(f"skipping {path}: it is torn or corrupt ({reason}); trying the one before it")
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + ".corrupt"))
        else:
            return content
    return b""


def unpack(content: bytes | bytearray, device: torch.device) -> State:
    """The state that was saved, its tensors on `device`; runs no code from the file."""
    state: State = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    return state


def tensors_sha256(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the raw bytes of the tensors, one after the other, each in row-major order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.numel():
            # Through a buffer that torch and Python share: Tensor.numpy() would need numpy.
            raw = bytearray(tensor.numel() * tensor.element_size())
            torch.frombuffer(raw, dtype=tensor.dtype).copy_(tensor.detach().flatten())
            digest.update(raw)
    return digest.hexdigest()


def _verify(state: State, mark: Mark) -> None:
    found = tensors_sha256(_tensors({key: value for key, value in state.items() if key != "sha256"}))
    if state["sha256"] != found:
        raise ValueError(f"its tensors have SHA-256 {found[:12]}…, not {state['sha256'][:12]}…")
    if state["step"] != mark.step:
        raise ValueError(f"it holds step {state['step']}")


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors in nested dictionaries and lists, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
