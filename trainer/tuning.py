"""The size of DDP's buckets, which `tune(module, warm_up)` measures once; all ranks agree on it, and it is stored.

A *pass* is a forward and backward pass whose gradients are summed over the ranks. All ranks run the same `search`,
which is pure, on the same times, which are those of the slowest rank, so they all come to the same choice. A size is in
MiB, as DDP's `bucket_cap_mb`; None is DDP's default: 25 MiB, and 1 MiB for the first bucket.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

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

# A size other than the default must save this share of a pass.
GAIN_MIN = 0.03
# DDP sums all gradients in one bucket in a first pass, and allocates the real buckets in a second; with `static_graph`
# one pass later.
_SETTLING = 3
_MEASURED = 3
# In the final, the best and the default take turns.
_TURNS, _MEASURED_IN_TURN = 3, 2
_SIZES_MB = (1.0, 5.0, 25.0, 100.0)
# The standard deviation of a normal distribution, in median absolute deviations.
_DEVIATION = 1.4826

Size: TypeAlias = float | None


def described(size: Size) -> str:
    """The size as text for a sentence."""
    return "DDP's default buckets" if size is None else f"buckets of {size:g} MiB"


@dataclass(frozen=True)
class SearchResult:
    """The chosen size, and why.

    `default_s` and `chosen_s` are medians of a pass, `spent_s` is the time of all `passes`.
    """

    bucket_mb: Size
    default_s: float
    chosen_s: float
    passes: int
    spent_s: float
    reason: str

    @property
    def gain(self) -> float:
        """How many times as fast a pass is as with DDP's default."""
        return self.default_s / self.chosen_s


def search(gradient_mb: float, run: Callable[[Size], float]) -> SearchResult:
    """Search with `run`, which makes a pass with buckets of that size, and returns the seconds of the slowest rank.

    The model sends `gradient_mb` MiB.
    """
    default: Size = None
    took_s: list[float] = []

    def measure(size: Size, count: int) -> list[float]:
        """The times of `count` passes with this size, after those in which DDP settles."""
        took_s.extend(run(size) for _ in range(_SETTLING + count))
        return took_s[-count:]

    def result(chosen: Size, samples: dict[Size, list[float]], reason: str) -> SearchResult:
        default_s, chosen_s = (statistics.median(samples[each]) for each in (default, chosen))
        return SearchResult(chosen, default_s, chosen_s, len(took_s), sum(took_s), reason)

    samples = {size: measure(size, _MEASURED) for size in (default, *sizes(gradient_mb))}
    best = min(samples, key=lambda each: statistics.median(samples[each]))
    if not _saves(samples[best], samples[default]):
        return result(default, samples, f"nothing else was faster by {GAIN_MIN:.0%}")
    # Only passes of the final count: the two took turns in it, whatever else changed.
    turns: list[dict[Size, list[float]]] = []
    for number in range(_TURNS):
        turns.append({})
        for size in (default, best) if number % 2 == 0 else (best, default):
            turns[-1][size] = measure(size, _MEASURED_IN_TURN)
    pooled: dict[Size, list[float]] = {each: [s for turn in turns for s in turn[each]] for each in (default, best)}
    # The least of a turn: something else on the machine makes single passes longer, and none shorter.
    wins_each = all(min(turn[best]) < min(turn[default]) for turn in turns)
    if wins_each and _saves(pooled[best], pooled[default]) and _is_clear(pooled[best], pooled[default]):
        return result(best, pooled, "it won each turn")
    return result(default, pooled, "what was faster at first was not when alternated")


def sizes(gradient_mb: float) -> list[float]:
    """The sizes to try besides the default."""
    found = [size for size in _SIZES_MB if size < gradient_mb]
    if gradient_mb > _SIZES_MB[0]:
        # One bucket: nothing overlaps with the backward pass, but it is one message.
        found.append(float(math.ceil(gradient_mb) + 1))
    return found


def _saves(samples: Sequence[float], beside: Sequence[float]) -> bool:
    """Whether `samples` are shorter by the share that is worth a change."""
    return statistics.median(samples) <= (1 - GAIN_MIN) * statistics.median(beside)


def _is_clear(samples: Sequence[float], beside: Sequence[float]) -> bool:
    """Whether `samples` are shorter by more than the noise of both."""
    return statistics.median(beside) - statistics.median(samples) > _noise_s(samples) + _noise_s(beside)


def _noise_s(samples: Sequence[float]) -> float:
    """A standard error of the median, by the samples' median distance from it."""
    middle = statistics.median(samples)
    return _DEVIATION * statistics.median(abs(each - middle) for each in samples) / math.sqrt(len(samples))


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
    log: Callable[[str], None] | None = None,
) -> DistributedDataParallel:
    """The module in DDP, with the size of buckets that was measured to be the fastest.

    All ranks call it before a Keeper is made. `warm_up` does one forward and backward pass of the model that it is
    given. `wrap` makes DDP of the module with other options than the default ones, and with a communication hook; it is
    called for each size, on the ranks of `group` (all). A choice that is stored in `folder`, on rank 0's node, is used
    without measuring. Tuning never chooses what is slower than DDP's default.

    `log` is called with log lines on rank 0. Raises ValueError where a pass trains, or DDP changes the module.
    """
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters()):
        raise ValueError("optimizers run in the backward pass of this model, so measured passes would train it")
    peers = Peers(group)
    log = (log or partial(print, file=sys.stderr, flush=True)) if peers.leads else lambda _: None
    try:
        if peers.world_size == 1:
            log("nothing to tune: there is one worker")
            return wrap(module, bucket_cap_mb=None)
        file = Path(folder) / _key_of(module, group)
        # Rank 0's file alone counts: all ranks must do the same.
        found, sentence = peers.broadcast(found_in(file, peers.world_size) if peers.leads else None)
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

    Parameters are not changed, buffers and random states are restored, and no wrapper is left.
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
        # All begin together, or a rank's time would include another rank's delay.
        peers.all_reduce_max([0])
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
    return peers.all_reduce_max([round(took_s * _NS_PER_S)])[0] / _NS_PER_S


def finish_device(device: torch.device) -> None:
    """Wait until the device has finished its queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and the random states after the body, and drop the gradients."""
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
    """The size to use, None to measure, and what is logged about it.

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
        return (size,), f"{described(size)}, as measured before (stored in {file})"
    if RankInfo.from_environ(os.environ).generation > 0:
        return (size,), f"{described(size)}, as this run measured with {its_size} workers"
    return None, ""


def keep(file: Path, result: SearchResult, world_size: int) -> str:
    """Store the choice. Returns where it is stored, or why it is not."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps({**asdict(result), "world_size": world_size}, indent=1).encode() + b"\n")
    except OSError as error:
        return f"not stored: {file.parent}: {reason(error).lower()}"
    return f"stored in {file}"


def sentence_of(result: SearchResult, stored: str) -> str:
    """The measurement, its gain and its cost, in one sentence."""
    spent = f"communication tuned in {result.passes} passes ({result.spent_s:.1f} s)"
    if result.bucket_mb is None:
        return f"{spent}: DDP's default buckets, {result.reason}; {stored}"
    return (
        f"{spent}: {described(result.bucket_mb)}; a pass takes {1000 * result.chosen_s:,.1f} ms, with DDP's default "
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
