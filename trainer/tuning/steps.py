"""Measures settings in the first real steps: between two of them the wrapper is rebuilt, and no step is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.tuning.passes import finish_device, slowest_s
from elaunch.trainer.tuning.rebuild import apply
from elaunch.trainer.tuning.search import SearchResult, SearchSpace, search


class StepTuner:
    """Runs the search while the program trains. `finish` gets the result, within the program's forward pass.

    A step begins with the first forward pass after a backward pass that has summed gradients, and ends where the next
    one begins. Passes without gradients begin none. So all ranks count the same steps, and at each of them agree on
    the slowest rank's time.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        space: SearchSpace,
        peers: Peers,
        finish: Callable[[SearchResult | None], None],
    ) -> None:
        self._ddp, self._peers, self._finish = ddp, peers, finish
        self._search = search(space)
        self._wanted = next(self._search)
        self._current = space.start
        self._begun_s: float | None = None
        # Whether the newest forward pass was one whose gradients are summed, and whether such gradients have come.
        self._sums = self._is_complete = False
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(self._before_forward),
            register_multi_grad_hook(parameters, self._on_gradient, mode="any"),
        ]

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._is_complete = self._is_complete or self._sums

    def _before_forward(self, module: torch.nn.Module, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        # Also before a pass within `no_sync`. DDP may exchange something in it, and where one rank accumulates over
        # more passes than another, what all ranks exchange must come in the same order.
        self._sums = self._ddp.require_backward_grad_sync
        if self._ddp._join_config.enable:
            # Ranks without data left make no forward pass, and so could not agree.
            self._end(None)
            return
        if self._begun_s is not None and not self._is_complete:
            return
        finish_device(self._ddp.device)
        now_s = time.perf_counter()
        if self._begun_s is not None:
            try:
                self._wanted = self._search.send(slowest_s(now_s - self._begun_s, self._peers))
            except StopIteration as end:
                self._end(end.value)
                return
        if self._wanted.settings != self._current:
            apply(self._ddp, self._wanted.settings, is_trial=True)
            self._current = self._wanted.settings
        self._is_complete = False
        self._begun_s = time.perf_counter()

    def _end(self, result: SearchResult | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._finish(result)
