"""Measures settings in passes that train nothing, before the first step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import link
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import rng_state
from elaunch.trainer.tuning.rebuild import apply
from elaunch.trainer.tuning.search import SearchResult, SearchSpace, search

NS_PER_S = 1_000_000_000


def measure(
    ddp: DistributedDataParallel, space: SearchSpace, warm_up: Callable[[], object], peers: Peers
) -> SearchResult:
    """Run the search with `warm_up`, which does one forward and backward pass. Collective.

    Parameters are not changed; buffers and random states are afterwards what they were. The wrapper is left with the
    settings that were measured last.
    """
    passes = search(space)
    current = space.start
    with unchanged(ddp):
        wanted = next(passes)
        while True:
            if wanted.settings != current:
                # For an agent it is a sign of life: on a slow link the passes take long, and no step ends.
                link.phase("tuning")
                apply(ddp, wanted.settings, is_trial=True)
                current = wanted.settings
            # All begin together, or a rank's time would have another rank's lateness in it.
            peers.largest([0])
            begun_s = time.perf_counter()
            with ddp.no_sync() if wanted.is_alone else contextlib.nullcontext():
                warm_up()
            finish_device(ddp.device)
            took_s = time.perf_counter() - begun_s
            ddp.zero_grad(set_to_none=True)
            try:
                wanted = passes.send(slowest_s(took_s, peers))
            except StopIteration as end:
                result: SearchResult = end.value
                return result


def slowest_s(took_s: float, peers: Peers) -> float:
    """The longest of all ranks' times: the same number on each of them."""
    return peers.largest([round(took_s * NS_PER_S)])[0] / NS_PER_S


def finish_device(device: torch.device) -> None:
    """Wait until the device has done what it was given. A CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put the buffers and the random states back when the body has ended, and drop the gradients."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    device = next(model.parameters()).device
    random = rng_state.RandomStates(device).capture()
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        rng_state.apply(random, device)
