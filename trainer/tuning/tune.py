"""`tune(module, warm_up)`: the size of DDP's buckets is measured once, agreed on by all ranks, and remembered."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.strict_json import parse_json
from elaunch.trainer import link
from elaunch.trainer.files import read_regular, reason, write_durably
from elaunch.trainer.ranks import RankInfo
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import rng_state
from elaunch.trainer.tuning import SearchResult, Size, in_words, search

_NS_PER_S = 1_000_000_000
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")
_CHOICE_BYTES_MAX, _SIZE_MB_MAX = 1 << 16, 1 << 20


class Wrap(Protocol):
    """Puts a module into DDP with buckets of this size. DDP itself does."""

    def __call__(self, module: nn.Module, /, *, bucket_cap_mb: Size) -> DistributedDataParallel: ...


def tune(
    module: nn.Module,
    warm_up: Callable[[DistributedDataParallel], object],
    *,
    wrap: Wrap = DistributedDataParallel,
    group: dist.ProcessGroup | None = None,
    folder: str | os.PathLike[str] = "tuning",
    say: Callable[[str], None] | None = None,
) -> DistributedDataParallel:
    """The module in DDP, with the size of buckets that was measured to be the fastest.

    All ranks call it before a Keeper is made. `warm_up` does one forward and backward pass of the model that it is
    given. `wrap` makes DDP of the module with other options than the default ones, and with a communication hook; it is
    called for each size, on the ranks of `group` (all). A choice that is stored in `folder`, on rank 0's node, is used
    without measuring. Tuning never chooses what is slower than DDP's default.

    `say` takes sentences on rank 0. Raises ValueError where a pass trains, or DDP changes the module.
    """
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters()):
        raise ValueError("optimizers run in the backward pass of this model, so measured passes would train it")
    peers = Peers(group)
    log = (say or partial(print, file=sys.stderr, flush=True)) if peers.leads else lambda _: None
    try:
        if peers.world_size == 1:
            log("nothing to tune: there is one worker")
            return wrap(module, bucket_cap_mb=None)
        file = Path(folder) / _key_of(module, group)
        # Rank 0's file alone counts: all ranks must do the same.
        found, sentence = peers.from_rank_0(found_in(file, peers.world_size) if peers.leads else None)
        if sentence:
            log(f"communication: {sentence}")
        if found is None:
            result = measure(module, warm_up, wrap, peers)
            if peers.leads:
                log(sentence_of(result, keep(file, result, peers.world_size)))
            found = (result.bucket_mb,)
        return wrap(module, bucket_cap_mb=found[0])
    finally:
        peers.close()


def measure(
    module: nn.Module, warm_up: Callable[[DistributedDataParallel], object], wrap: Wrap, peers: Peers
) -> SearchResult:
    """Run the search with `warm_up`, which does one forward and backward pass. Collective.

    Parameters are not changed; buffers and random states are afterwards what they were, and no wrapper is left.
    """
    gradients = [each for each in module.parameters() if each.requires_grad]
    device = gradients[0].device
    current: tuple[Size, DistributedDataParallel] | None = None

    def run(size: Size) -> float:
        nonlocal current
        if current is None or size != current[0]:
            # A heartbeat for the agent: on a slow link the passes take long, and no step ends.
            link.phase("tuning")
            # The old wrapper's buckets are as large as all gradients.
            current = None
            gc.collect()
            current = size, wrap(module, bucket_cap_mb=size)
            if getattr(current[1], "mixed_precision", None) is not None:
                raise ValueError(
                    "DDP's mixed_precision leaves hooks on the module, so it cannot be made again; leave it out"
                )
        # All begin together, or a rank's time would have another rank's lateness in it.
        peers.largest([0])
        begun_s = time.perf_counter()
        warm_up(current[1])
        finish_device(device)
        took_s = time.perf_counter() - begun_s
        module.zero_grad(set_to_none=True)
        return slowest_s(took_s, peers)

    try:
        with unchanged(module):
            return search(sum(each.numel() * each.element_size() for each in gradients) / (1 << 20), run)
    finally:
        current = None
        gc.collect()


def slowest_s(took_s: float, peers: Peers) -> float:
    """The longest of all ranks' times: the same number on each of them. Collective."""
    return peers.largest([round(took_s * _NS_PER_S)])[0] / _NS_PER_S


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


def found_in(file: Path, world_size: int) -> tuple[tuple[Size] | None, str]:
    """The size to use, None to measure, and what is logged of it.

    A restart does not wait for a measurement: it uses the run's choice also with another number of workers. A damaged
    file is no error: the choice is then measured again.
    """
    try:
        record = parse_json(read_regular(file, _CHOICE_BYTES_MAX))
        size, its_size = record["bucket_mb"], int(record["world_size"])
        if size is not None and not (isinstance(size, int | float) and 0 < size <= _SIZE_MB_MAX):
            raise ValueError("its size is unknown")
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"{file} cannot be used ({reason(error).lower()}), and is written again"
    if its_size == world_size:
        return (size,), f"{in_words(size)}, as measured before (stored in {file})"
    if RankInfo.from_environ(os.environ).generation > 0:
        return (size,), f"{in_words(size)}, as this run measured with {its_size} workers"
    return None, ""


def keep(file: Path, result: SearchResult, world_size: int) -> str:
    """Store the choice. Returns where it is, or why it is nowhere."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps({**asdict(result), "world_size": world_size}, indent=1).encode() + b"\n")
    except OSError as error:
        return f"not stored: {file.parent}: {reason(error).lower()}"
    return f"stored in {file}"


def sentence_of(result: SearchResult, stored: str) -> str:
    """What was measured, what it gained and what it cost, in one sentence."""
    spent = f"communication tuned in {result.passes} passes ({result.spent_s:.1f} s)"
    if result.bucket_mb is None:
        return f"{spent}: DDP's default buckets, {result.reason}; {stored}"
    return (
        f"{spent}: {in_words(result.bucket_mb)}; a pass takes {1000 * result.chosen_s:,.1f} ms, with DDP's default "
        f"{1000 * result.default_s:,.1f} ms ({result.gain:.2f} times as fast); {stored}"
    )


def _key_of(module: nn.Module, group: dist.ProcessGroup | None) -> str:
    """The name of the choice's file, made of all that the choice depends on but for the number of workers."""
    shapes = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in module.named_parameters()]
    device = next(module.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    interfaces = [f"{name}={os.environ[name]}" for name in _INTERFACES if os.environ.get(name)]
    key = (shapes, (dist.get_backend(group), name, interfaces), torch.__version__)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]
