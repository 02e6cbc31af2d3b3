"""Windows of text as tensors: a rank's share of a step, and the held-out ones."""

from __future__ import annotations

import torch
from torch import Tensor

from elaunch.trainer.config import TrainConfig
from elaunch.trainer.corpus import Corpus
from elaunch.trainer.order import share_of, windows_of_step
from elaunch.trainer.place import Place

HELD_OUT_WINDOWS_MAX = 96


class Batches:
    """Cuts the corpus into windows of `context + 1` bytes that share none: `context` inputs, and targets one byte on.

    Inputs and targets are (windows, context) int64 on `device`, values 0..255.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, place: Place, device: torch.device) -> None:
        self._config, self._corpus, self._place, self._device = config, corpus, place, device
        self._window = config.context + 1
        self.windows = corpus.held_out_start // self._window

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of step 1, 2, …"""
        config = self._config
        drawn = windows_of_step(step, seed=config.seed, global_batch=config.global_batch, windows=self.windows)
        return self._read(
            [number * self._window for number in share_of(drawn, self._place.rank, self._place.world_size)]
        )

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of the held-out windows, one at a time; spread evenly, the same for every run."""
        start = self._corpus.held_out_start
        there = (self._corpus.size - start) // self._window
        used = min(there, HELD_OUT_WINDOWS_MAX)
        mine = range(self._place.rank, used, self._place.world_size)
        return [self._read([start + (number * there // used) * self._window]) for number in mine]

    def _read(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        text = bytearray().join(self._corpus.read(start, self._window) for start in starts)
        rows = torch.frombuffer(text, dtype=torch.uint8).view(len(starts), self._window)
        rows = rows.to(self._device, torch.int64)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
