"""`tune(model, warm_up)`: the size of DDP's buckets is measured once, agreed on by all ranks, and remembered."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.strict_json import parse_json
from elaunch.trainer import link
from elaunch.trainer.files import read_regular, reason, write_durably
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.state import rng_state
from elaunch.trainer.tuning.search import SearchResult, Size, in_words, search

_NS_PER_S = 1_000_000_000
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")
_CHOICE_BYTES_MAX, _SIZE_MB_MAX = 1 << 16, 1 << 20
# What the wrapper has from elsewhere than its constructor's arguments, or what its passes have made of it.
_KEPT = frozenset(
    (
        *nn.Module().__dict__,
        *("module", "process_group", "device_mesh", "require_backward_grad_sync", "require_forward_param_sync"),
        *("_join_config", "_divide_by_initial_world_size"),
    )
)
# Arguments of the constructor that the wrapper has as attributes of the same names. Not every release has all of them.
_ARGUMENTS = (
    *("device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "static_graph"),
    *("gradient_as_bucket_view", "skip_all_reduce_unused_params", "batched_grad_copy"),
)


@dataclass(frozen=True)
class Tuned:
    """What `tune` has done: the buckets' size (None: as it was), and what was measured, None if nothing was."""

    bucket_mb: Size = None
    result: SearchResult | None = None


def tune(
    model: nn.Module,
    warm_up: Callable[[], object],
    *,
    folder: str | os.PathLike[str] = "tuning",
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Choose the size of the buckets of `model`'s DDP, unless the program has chosen one.

    All ranks call it after the model is in DDP, before a Keeper is made and before the first pass. `warm_up` does one
    forward and backward pass, as for the Keeper. A choice that is stored in `folder`, on rank 0's node, is used without
    measuring. Tuning never chooses what is slower than DDP's default.

    `say` takes sentences on rank 0. Raises ValueError for several DDP wrappers.
    """
    ddp = wrapper_in(model)
    log = (
        (say or partial(print, file=sys.stderr, flush=True))
        if ddp is None or dist.get_rank(ddp.process_group) == 0
        else lambda _: None
    )
    if ddp is None:
        log("nothing to tune: the model is in no DistributedDataParallel")
        return Tuned()
    if ddp.process_group.size() == 1:
        log("nothing to tune: there is one worker")
        return Tuned()
    if why := obstacle(model, ddp):
        log(f"the communication is not tuned: {why}")
        return Tuned()
    peers = Peers(ddp.process_group)
    try:
        return _tuned(ddp, warm_up, peers, Path(folder), log)
    finally:
        peers.close()


def _tuned(
    ddp: DistributedDataParallel,
    warm_up: Callable[[], object],
    peers: Peers,
    folder: Path,
    log: Callable[[str], None],
) -> Tuned:
    file, world_size = folder / _key_of(ddp), ddp.process_group.size()
    # Rank 0's file alone counts: all ranks must do the same.
    found, sentence = peers.from_rank_0(found_in(file, world_size) if peers.leads else None)
    if sentence:
        log(f"communication: {sentence}")
    if found is not None:
        # Also if it is the default: buckets settle in the same way after each start.
        apply(ddp, found.bucket_mb)
        return found
    result = measure(ddp, warm_up, peers)
    if peers.leads:
        log(sentence_of(result, keep(file, result, world_size)))
    apply(ddp, result.bucket_mb)
    return Tuned(result.bucket_mb, result)


def measure(ddp: DistributedDataParallel, warm_up: Callable[[], object], peers: Peers) -> SearchResult:
    """Run the search with `warm_up`, which does one forward and backward pass. Collective.

    Parameters are not changed; buffers and random states are afterwards what they were. The wrapper is left with the
    size that was measured last.
    """
    gradients = [each for each in ddp.module.parameters() if each.requires_grad]
    current: Size = None

    def run(size: Size) -> float:
        nonlocal current
        if size != current:
            # A heartbeat for the agent: on a slow link the passes take long, and no step ends.
            link.phase("tuning")
            apply(ddp, size)
            current = size
        # All begin together, or a rank's time would have another rank's lateness in it.
        peers.largest([0])
        begun_s = time.perf_counter()
        warm_up()
        finish_device(ddp.device)
        took_s = time.perf_counter() - begun_s
        ddp.zero_grad(set_to_none=True)
        return slowest_s(took_s, peers)

    with unchanged(ddp):
        return search(sum(each.numel() * each.element_size() for each in gradients) / (1 << 20), run)


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


def found_in(file: Path, world_size: int) -> tuple[Tuned | None, str]:
    """The choice to use, None to measure, and what is logged of it.

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
        return Tuned(size), f"{in_words(size)}, as measured before (stored in {file})"
    if RankInfo.from_environ(os.environ).generation > 0:
        return Tuned(size), f"{in_words(size)}, as this run measured with {its_size} workers"
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


def _key_of(ddp: DistributedDataParallel) -> str:
    """The name of the choice's file, made of all that the choice depends on but for the number of workers."""
    shapes = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in ddp.module.named_parameters()]
    device = torch.cuda.get_device_name(ddp.device) if ddp.device.type == "cuda" else ddp.device.type
    interfaces = [f"{name}={os.environ[name]}" for name in _INTERFACES if os.environ.get(name)]
    link_of_ranks = (dist.get_backend(ddp.process_group), device, interfaces)
    key = (shapes, link_of_ranks, torch.__version__, ddp.gradient_as_bucket_view, ddp.static_graph)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def wrapper_in(model: nn.Module) -> DistributedDataParallel | None:
    """The model's one DDP wrapper, None if it has none. Raises ValueError if it has several."""
    found = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} DistributedDataParallel in one model cannot be tuned together; give one of them"
        )
    return found[0] if found else None


def obstacle(model: nn.Module, ddp: DistributedDataParallel) -> str:
    """Why this wrapper's buckets must stay as they are; "" if they need not."""
    is_stateful = any(not isinstance(state, dist.ProcessGroup | None) for _, state in ddp._comm_hooks)
    built_in = not ddp._comm_hooks and ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters())
    compiled = [each for each in (model, ddp) if getattr(each, "_compiled_call_impl", None) is not None]
    found = {
        "the program has chosen their size": not ddp.bucket_bytes_cap_default,
        "its communication hook has a state that belongs to its buckets": is_stateful or len(ddp._comm_hooks) > 1,
        f"it has torch's built-in hook {built_in}": bool(built_in),
        "it has mixed_precision": getattr(ddp, "mixed_precision", None) is not None,
        "all-reduces of some parameters are delayed": bool(getattr(ddp, "_delay_all_reduce_params", None)),
        "optimizers run in its backward pass": in_backward,
        "torch.compile has its reducer": bool(getattr(ddp, "_use_python_reducer", False)),
        "it is compiled as a whole; compile the module inside instead": bool(compiled) or hasattr(model, "_orig_mod"),
    }
    return next((why for why, is_so in found.items() if is_so), "")


def apply(ddp: DistributedDataParallel, bucket_mb: Size) -> None:
    """Rebuild its reducer with buckets of this size, as all ranks do. Call it when no pass has begun.

    The wrapper stays the same object round the same module: hooks on both, a Keeper, and whoever else refers to them
    are not affected. No parameter, buffer or gradient changes, and nothing is sent.
    """
    hooks, arguments = [*ddp._comm_hooks], _arguments(ddp)
    # The old reducer's buckets are as large as all gradients. It also takes its hooks off the parameters as it goes.
    for name in ("logger", "reducer"):
        ddp.__dict__.pop(name)
    fresh = DistributedDataParallel(ddp.module, **arguments, bucket_cap_mb=bucket_mb)
    ddp.__dict__.update({name: value for name, value in fresh.__dict__.items() if name not in _KEPT})
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


def _arguments(ddp: DistributedDataParallel) -> dict[str, Any]:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    found = {name: getattr(ddp, name) for name in _ARGUMENTS if name in known and hasattr(ddp, name)}
    # The ranks have the same parameters already. Sending them would take longer than the passes that are measured.
    found["init_sync"] = False
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    found[sync] = ddp.broadcast_buffers
    return found
