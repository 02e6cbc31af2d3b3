"""The keeper's durable checkpoints, as single files of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elaunch.trainer.checkpoint import Mark, fencing_generation, load_newest, marks, save, unpack
from elaunch.trainer.peers import Peers


class Checkpoints:
    """The newest whole one in `directory` wins; all ranks call everything here together."""

    def __init__(self, directory: Path, generation: int, peers: Peers, say: Callable[[str], None]) -> None:
        self._directory, self._peers, self._say = directory, peers, say
        self._fence = 0
        if peers.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            self._fence = fencing_generation(directory, generation)
        self._saved = -1

    def newest(self) -> int:
        """The step of the newest one, whole or not, -1 without any; as rank 0 sees it."""
        found = marks(self._directory) if self._peers.rank == 0 else []
        step: int = self._peers.gather(found[-1].step if found else -1)[0]
        return step

    def load_newest(self, state: dict[str, Any]) -> int:
        """Fill `state` with the newest whole one; its step, or -1 where there is none."""
        content = load_newest(self._directory, self._say) if self._peers.rank == 0 else b""
        content = self._peers.gather(content)[0]
        if not content:
            return -1
        state.update(unpack(content, torch.device("cpu")))
        step: int = state["step"]
        return step

    def save_async(self, step: int, state: dict[str, Any]) -> None:
        """Make `state` durable, unless that step is."""
        if self._peers.rank == 0 and step != self._saved:
            try:
                save(self._directory, Mark(self._fence, step), {**state, "step": step})
                self._saved = step
            except OSError as error:
                self._say(f"the checkpoint of step {step} could not be written: {error.strerror}; training goes on")

    def wait(self) -> None:
        """Until what was saved is durable."""
