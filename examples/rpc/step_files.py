"""What one process alone has, after each step: in memory that outlives the process, and now and then on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

# Another process may be one step behind.
_KEPT = 3


class StepFiles:
    """The states of the last three steps in `ELAUNCH_MEMORY`, and each `every`-th one on the disk, in `folder`.

    Under torchrun, and if the memory is lost, only those of the disk are there.
    """

    def __init__(self, name: str, folder: str, every: int) -> None:
        self._name, self._disk, self._every = name, Path(folder), every
        self._disk.mkdir(parents=True, exist_ok=True)
        memory = os.environ.get("ELAUNCH_MEMORY")
        self._memory = Path(memory) if memory else None

    def steps(self) -> set[int]:
        """The steps whose state can be loaded."""
        return {int(path.name.rpartition("-")[2]) for path in self._all()}

    def save(self, step: int, state: Any) -> None:
        """Keep the state of this step. A process that is killed meanwhile leaves the older ones as they are."""
        if self._memory is not None:
            self._write(self._memory / self._file(step), state)
            for path in self._all(self._memory):
                if int(path.name.rpartition("-")[2]) <= step - _KEPT:
                    path.unlink()
        if step % self._every == 0:
            self._write(self._disk / self._file(step), state)

    def load(self, step: int) -> Any:
        """The state of that step. It is on the disk afterwards, too. Raises RuntimeError if it is nowhere."""
        path = next((path for path in self._all() if path.name == self._file(step)), None)
        if path is None:
            there = ", ".join(map(str, sorted(self.steps()))) or "none"
            raise RuntimeError(
                f"the state of step {step} of {self._name} is nowhere; there are those of steps: {there}"
            )
        self.to_disk(step)
        return torch.load(path)

    def to_disk(self, step: int) -> None:
        """Copy the state of that step from memory to the disk, if it is not there."""
        if self._memory is not None and (self._memory / self._file(step)).exists():
            part = self._disk / f".{self._file(step)}"
            shutil.copy(self._memory / self._file(step), part)
            part.replace(self._disk / self._file(step))

    def _all(self, *folders: Path) -> list[Path]:
        searched = folders or [folder for folder in (self._memory, self._disk) if folder is not None]
        return [path for folder in searched for path in folder.glob(f"{self._name}.step-*")]

    def _file(self, step: int) -> str:
        return f"{self._name}.step-{step}"

    def _write(self, path: Path, state: Any) -> None:
        part = path.with_name(f".{path.name}")
        torch.save(state, part)
        part.replace(path)
