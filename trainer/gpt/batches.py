"""Windows of text as tensors: those of a micro-batch, and those held out for validation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.ranks.place import RankInfo

HELD_OUT_WINDOWS_MAX = 96


class CorpusBatches:
    """Cuts the corpus into disjoint windows of `context + 1` bytes: `context` inputs, and targets one byte further.

    Inputs and targets are (windows, context) int64 on `device`, values 0..255. `order` says which windows come when.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, place: RankInfo, device: torch.device) -> None:
        self._corpus, self._place, self._device = corpus, place, device
        self._window = config.context + 1
        self.order = Order(
            corpus.held_out_start // self._window,
            seed=config.seed,
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
        )

    def read(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the windows with those numbers."""
        return self._read([number * self._window for number in windows])

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of the held-out windows, one by one. They are spread evenly, and the same for every run."""
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
