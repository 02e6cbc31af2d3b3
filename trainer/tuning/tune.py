"""`tune(model, warm_up)`: how DDP sends gradients is measured once, agreed on by all ranks, and remembered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch import user_cache
from elaunch.trainer import link
from elaunch.trainer.files import read_own_record, reason, write_durably
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.state import rng_state
from elaunch.trainer.tuning import rebuild
from elaunch.trainer.tuning.search import LOSSY_HOOKS, CommSettings, SearchResult, SearchSpace, search

_MB = 1 << 20
_NS_PER_S = 1_000_000_000
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")
_CHOICE_BYTES_MAX, _CHOICES_MAX, _SIZE_MB_MAX = 1 << 16, 200, 1 << 20


@dataclass(frozen=True)
class Tuned:
    """What `tune` has done: the present settings, and what was measured, None if nothing was.

    `hook_state` is the state of a chosen hook for the Keeper's argument of that name, None without one.
    """

    settings: CommSettings
    hook_state: Any = None
    result: SearchResult | None = None


def tune(
    model: nn.Module,
    warm_up: Callable[[], object],
    *,
    lossy: bool = False,
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Choose the buckets and views of `model`'s DDP, and with `lossy` also a hook that rounds gradients.

    All ranks call it after the model is in DDP, before a Keeper is made and before the first pass. `warm_up` does one
    forward and backward pass, as for the Keeper. A remembered choice is used without measuring; it is in `folder`, the
    run's own, or without one in the user's cache folder. Tuning never chooses what is slower than the model as it is.

    Sizes, views and hooks that the program gave DDP stay. `say` takes sentences on rank 0. Raises ValueError for
    several DDP wrappers.
    """
    ddp = rebuild.wrapper_in(model)
    log = (say or _to_stderr) if ddp is None or dist.get_rank(ddp.process_group) == 0 else lambda _: None
    if ddp is None:
        log("nothing to tune: the model is in no DistributedDataParallel")
        return Tuned(CommSettings())
    start = rebuild.settings_of(ddp)
    if ddp.process_group.size() == 1:
        log("nothing to tune: there is one worker")
        return Tuned(start)
    if why := rebuild.obstacle(model, ddp):
        log(f"the communication is not tuned: {why}")
        return Tuned(start)
    peers = Peers(ddp.process_group)
    try:
        return _tuned(ddp, warm_up, peers, start, LOSSY_HOOKS if lossy else (), folder, log)
    finally:
        peers.close()


def _tuned(
    ddp: DistributedDataParallel,
    warm_up: Callable[[], object],
    peers: Peers,
    start: CommSettings,
    hooks: tuple[str, ...],
    folder: Path | None,
    log: Callable[[str], None],
) -> Tuned:
    fixed = rebuild.given_by_program(ddp)
    here = {one for one in hooks if "hook" not in fixed and rebuild.works_here(one, ddp)}
    everywhere = set.intersection(*peers.from_all(here))
    gradients = [each for each in ddp.module.parameters() if each.requires_grad]
    space = SearchSpace(
        start,
        sum(each.numel() * each.element_size() for each in gradients) / _MB,
        fixed=fixed,
        hooks=tuple(one for one in hooks if one in everywhere),
        is_static=bool(ddp.static_graph),
    )
    choices = Choices(folder, _key_of(ddp, space), ddp.process_group.size(), space.hooks)
    # Rank 0's file alone counts: all ranks must do the same.
    found, sentence = peers.from_rank_0(choices.found() if peers.leads else None)
    if sentence:
        log(f"communication: {sentence}")
    if found is not None:
        # Also if they are the present ones: buckets settle in the same way after each start.
        return Tuned(found, rebuild.apply(ddp, found))
    result = measure(ddp, space, warm_up, peers)
    if peers.leads:
        log(sentence_of(result, choices.keep(result)))
    return Tuned(result.settings, rebuild.apply(ddp, result.settings), result)


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
                # A heartbeat for the agent: on a slow link the passes take long, and no step ends.
                link.phase("tuning")
                rebuild.apply(ddp, wanted.settings, is_trial=True)
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


class Choices:
    """The file of the choice for a key: in the run's folder, or without one in the user's cache folder.

    A file that is damaged, or that cannot be written, is no error: the choice is then measured again.
    """

    def __init__(self, folder: Path | None, key: str, world_size: int, hooks: tuple[str, ...]) -> None:
        self._is_cache = folder is None
        self._folder = folder or user_cache.cache_folder(os.environ, "tuning")
        self._name, self._world_size, self._hooks = key, world_size, hooks

    def found(self) -> tuple[CommSettings | None, str]:
        """The choice to use, None to measure, and what is logged of it.

        A restart does not wait for a measurement: it uses the run's choice also with another number of workers.
        """
        if self._folder is None:
            return None, ""
        file = self._folder / self._name
        try:
            record = read_own_record(file, _CHOICE_BYTES_MAX)
            settings, world_size = _settings(record["settings"], self._hooks), int(record["world_size"])
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError, TypeError, KeyError) as error:
            return None, f"{file} cannot be used ({reason(error).lower()}), and is written again"
        if world_size == self._world_size:
            return settings, f"{settings}, as measured before (stored in {file})"
        if RankInfo.from_environ(os.environ).generation > 0:
            return settings, f"{settings}, as this run measured with {world_size} workers"
        return None, ""

    def keep(self, result: SearchResult) -> str:
        """Store the choice. Returns where it is, or why it is nowhere."""
        if self._folder is None:
            return "not stored: neither HOME nor XDG_CACHE_HOME is a path"
        record = {**asdict(result), "world_size": self._world_size}
        try:
            if self._is_cache and not user_cache.make(self._folder):
                return f"not stored: {self._folder} is not this user's own"
            self._folder.mkdir(parents=True, exist_ok=True)
            write_durably(self._folder / self._name, json.dumps(record, indent=1).encode() + b"\n")
            if self._is_cache:
                user_cache.remove_oldest(self._folder, _CHOICES_MAX)
        except OSError as error:
            return f"not stored: {self._folder}: {reason(error).lower()}"
        return f"stored in {self._folder / self._name}"


def _settings(found: object, hooks: tuple[str, ...]) -> CommSettings:
    """Raises TypeError or ValueError for what is not the settings of a file of ours."""
    if not isinstance(found, dict):
        raise TypeError("it has no settings")
    settings = CommSettings(**found)
    size = settings.bucket_mb
    is_size = size is None or (isinstance(size, int | float) and 0 < size <= _SIZE_MB_MAX)
    if not is_size or not isinstance(settings.bucket_view, bool) or settings.hook not in ("none", *hooks):
        raise ValueError("its settings are unknown")
    return settings


def sentence_of(result: SearchResult, stored: str) -> str:
    """What was measured, what it gained and what it cost, in one sentence."""
    spent = f"communication tuned in {result.passes} passes ({result.spent_s:.1f} s)"
    if result.settings == result.start:
        return f"{spent}: {result.start} as before, {result.reason}; {stored}"
    return (
        f"{spent}: {result.settings}; a pass takes {1000 * result.chosen_s:,.1f} ms, with the program's own settings "
        f"{1000 * result.start_s:,.1f} ms ({result.gain:.2f} times as fast); {stored}"
    )


def _key_of(ddp: DistributedDataParallel, space: SearchSpace) -> str:
    """The name of the choice's file, made of all that the choice depends on but for the number of workers."""
    shapes = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in ddp.module.named_parameters()]
    device = torch.cuda.get_device_name(ddp.device) if ddp.device.type == "cuda" else ddp.device.type
    interfaces = [f"{name}={os.environ[name]}" for name in _INTERFACES if os.environ.get(name)]
    link_of_ranks = (dist.get_backend(ddp.process_group), device, interfaces)
    key = (shapes, link_of_ranks, torch.__version__, space.hooks, space.start, sorted(space.fixed))
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
