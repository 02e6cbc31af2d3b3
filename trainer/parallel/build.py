"""Carries out a plan: divides the network among the workers, and makes each worker's optimizer.

With `--parallel auto` plans that fit the memory are tried, the fastest is chosen, and a restart keeps it.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from elaunch.strict_json import parse_json
from elaunch.trainer import link
from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import AgreedRefusal, ConfigError, RunDirectory, TrainConfig
from elaunch.trainer.gpt.model import GPT, VOCABULARY
from elaunch.trainer.memory.capacity import SPARE_SHARE, shared_by, tightest_capacity
from elaunch.trainer.parallel.estimate import Candidate, candidates, resumed
from elaunch.trainer.parallel.plan import AUTO, ParallelPlan, PlanError, Sizes, parse
from elaunch.trainer.parallel.whole import Whole, in_ddp
from elaunch.trainer.ranks import RankInfo
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.model_state import passes_to_final_sums
from elaunch.trainer.tuning import finish_device, slowest_s

if TYPE_CHECKING:
    from elaunch.trainer.parallel.divided import Pipeline, TensorParallel

Groups: TypeAlias = Callable[[nn.Module], list[dict[str, object]]]
# What the loop uses. The two other classes are imported when they are needed: a restart waits for imports.
Parallel: TypeAlias = "Whole | TensorParallel | Pipeline"

# At most this many plans are measured, and no further one after this many seconds, if one fits.
TRIALS_MAX = 8
TRYING_ENOUGH_S = 120.0
# Steps of a trial.
_MEASURED = 3
# No further step of a trial is measured after this many seconds.
_ENOUGH_S = 20.0
_NORM_MAX = 1.0
# The formulas may be too low by this share.
_MARGIN = 0.25
# A plainer plan is chosen up to this ratio of step times: two measurements differ by more.
_AS_FAST = 1.03
_GIB = 1 << 30


def build(config: TrainConfig, gpt: GPT, sizes: Sizes, rank: int, device: torch.device, groups: Groups) -> Parallel:
    """Divide `gpt`, which is the same on every worker, by the plan. Collective.

    `groups` makes AdamW's groups of a module's parameters, with all their options. Raises ConfigError.
    """
    if config.bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no bfloat16; leave --bf16 out")
    if config.compile:
        # A single worker has no collectives.
        gpt.compile_in(parts=not config.plan.has_ddp or sizes.share(rank).world_size > 1)
    plan = config.plan
    if plan.divides_model:
        return _divided(config, plan, gpt, sizes, rank, device, groups)
    model, optimizer = _whole(config, gpt, sizes, device, groups)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16)
    return Whole(plan, sizes.share(rank), gpt, model, optimizer, autocast)


def _whole(config: TrainConfig, gpt: GPT, sizes: Sizes, device: torch.device, groups: Groups) -> tuple[nn.Module, Any]:
    """The module whose backward sums gradients over the workers, and the optimizer."""
    plan = config.plan
    if plan.has_ddp:
        # `tune` wraps the model later.
        model = gpt if config.tune_comm else in_ddp(gpt, device, hook=config.comm_hook, bucket_cap_mb=config.bucket_mb)
        if plan.kind == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return model, ZeroRedundancyOptimizer(groups(gpt), AdamW, fused=True)
        return model, AdamW(groups(gpt), fused=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A mesh of all workers along one axis uses their group, and makes no other.
    if plan.kind == "hsdp":
        mesh = init_device_mesh(device.type, (sizes.dp, sizes.fsdp), mesh_dim_names=("dp", "fsdp"))
    else:
        mesh = init_device_mesh(device.type, (sizes.fsdp,), mesh_dim_names=("fsdp",))
    # ZeRO-2 keeps the gathered parameters until the backward pass has used them.
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": plan.kind != "zero2"}
    for block in gpt.blocks:
        fully_shard(block, **options)
    fully_shard(gpt, **options)
    return gpt, AdamW(groups(gpt), fused=True)


def _divided(
    config: TrainConfig, plan: ParallelPlan, gpt: GPT, sizes: Sizes, rank: int, device: torch.device, groups: Groups
) -> Parallel:
    """This worker's part of a network that several workers compute."""
    # Imported here, since the import takes long, and a restart waits for it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from elaunch.trainer.parallel.divided import GptStage, ModelPart, Pipeline, TensorParallel, divide

    axes = {"pp": sizes.pp, "dp": sizes.dp, "fsdp": sizes.fsdp, "tp": sizes.tp}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    numbers = [mesh.get_local_rank("pp") + turn * plan.pp for turn in range(plan.stages_per_worker)]
    names = {name: parameter.shape for name, parameter in gpt.named_parameters()}
    part = ModelPart(gpt, plan, numbers)
    tp = mesh["tp"] if sizes.tp > 1 else None
    if tp is not None:
        divide(part, tp)
    local = [GptStage(part, plan, number, config.layers, tp=tp, device=device, bf16=config.bf16) for number in numbers]
    # A pipeline computes a stage for many micro-batches in turn: it would gather the parameters for each.
    options: dict[str, Any] = {"mesh": mesh["dp", "fsdp"], "reshard_after_forward": plan.pp == 1}
    for stage in local:
        for block in stage.blocks:
            fully_shard(block, **options)
        fully_shard(stage, **options)
    optimizer = AdamW(groups(part), fused=True)
    kind = TensorParallel if sizes.pp == 1 else Pipeline
    return kind(plan, sizes.share(rank), config.shape, part, local, mesh, optimizer, names, device)


class NothingFits(ConfigError):
    """No plan fits into the memory: a sentence with the values and the way out."""


@dataclass(frozen=True)
class WorkerCapacity:
    """The bytes that a worker may take, those that are taken before any plan, and what limits it."""

    limit: int
    used: int
    where: str

    def needed(self, candidate: Candidate, training: int | None = None) -> int:
        """The bytes a worker needs for a plan: `used`, and `training` or else the formulas' bytes with a margin."""
        step = int(candidate.memory.step * (1 + _MARGIN)) if training is None else training
        return self.used + step


def choose(
    among: Sequence[Candidate],
    capacity: WorkerCapacity,
    measure: Callable[[Candidate], PlanTrial],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Candidate, int]:
    """The fastest of those that fit as measured, and how many were measured. Raises NothingFits.

    `among` begins with the plainest. No further one is measured once `is_over`. All workers call this with the same
    values and get the same choice.
    """
    # Of plans that differ in the order of computation only, one is measured.
    tried: set[tuple[str, int, int]] = set()
    fitting: list[tuple[Candidate, float]] = []
    for each in among:
        if capacity.needed(each) > capacity.limit or each.plan.form in tried:
            continue
        if fitting and (len(tried) >= TRIALS_MAX or is_over()):
            break
        tried.add(each.plan.form)
        trial = measure(each)
        if capacity.needed(each, trial.memory) <= capacity.limit:
            fitting.append((each, trial.step_s))
    if not fitting:
        raise NothingFits(refusal(among, capacity))
    best_s = min(step_s for _, step_s in fitting)
    return next(each for each, step_s in fitting if step_s <= _AS_FAST * best_s), len(tried)


def refusal(among: Sequence[Candidate], capacity: WorkerCapacity) -> str:
    """Why nothing can be chosen, and the way out."""
    least = min(among, key=capacity.needed)
    return (
        f"--parallel auto: no plan fits. The smallest is {least.plan.text}: it needs {gib(capacity.needed(least))} for "
        f"each worker (of which {gib(capacity.used)} the process itself), and a worker may take {gib(capacity.limit)}: "
        f"{capacity.where}; give the job more memory, or use fewer workers on a node, a smaller --micro-batch or a "
        "smaller network"
    )


def gib(size: int) -> str:
    """Bytes in GiB, with two decimals."""
    return f"{size / _GIB:.2f} GiB"


@dataclass(frozen=True)
class KeptPlan:
    """A choice that a run has made: its state belongs to that plan."""

    plan: str
    world_size: int

    @classmethod
    def read(cls, content: bytes) -> KeptPlan:
        """Raises ValueError for what is not one."""
        try:
            record = cls(**parse_json(content))
            if parse(record.plan).is_auto or record.world_size < 1:
                raise ValueError("it is damaged")
        except (TypeError, AttributeError, PlanError) as error:
            raise ValueError("it is damaged") from error
        return record

    @property
    def content(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def chosen(
    config: TrainConfig,
    place: RankInfo,
    run: RunDirectory,
    device: torch.device,
    *,
    new_gpt: Callable[[], GPT],
    groups: Groups,
    log: Callable[[str], None],
) -> TrainConfig:
    """`config` with a plan in place of `auto`, the same on all ranks. Collective. Raises AgreedRefusal on all ranks.

    A run that has a state continues with its plan, and nothing is measured. `new_gpt` and `groups` are as for `build`.
    Trials leave nothing behind: parameters and random states are created again.
    """
    peers = Peers()
    try:
        recorded, trouble = peers.broadcast(_recorded(place, run) if peers.leads else None)
        if trouble:
            raise NothingFits(trouble)
        if recorded is not None:
            return replace(config, parallel=_as_recorded(recorded, config, place, log))
        of_node = min(peers.all_gather(int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))))
        among = candidates(
            place.world_size,
            of_node,
            config.shape,
            needs_ddp=bool(config.ddp_options),
            bf16=config.bf16,
        )
        if not among:
            # DDP requires the least of the batch, so its error names the cause.
            replace(config, parallel="ddp").check(place)
        capacity = _capacity(device, of_node, peers)
        begun_s = time.monotonic()

        def measure(candidate: Candidate) -> PlanTrial:
            text = candidate.plan.text
            # A single candidate is not compiled: that takes no less memory.
            tried = replace(config, parallel=text, compile=config.compile and len(among) > 1, tune_comm=False)
            trial = try_plan(tried, candidate.sizes, place.rank, device, peers, new_gpt=new_gpt, groups=groups)
            needs = capacity.needed(candidate, trial.memory)
            verdict = f"; it needs {gib(needs)} of {gib(capacity.limit)}" if needs > capacity.limit else ""
            measured = "" if trial.memory is None else f" and {gib(trial.memory)}"
            log(f"parallel: {text}: a step takes {1000 * trial.step_s:,.1f} ms{measured}{verdict}")
            return trial

        def is_over() -> bool:
            spent: bool = peers.broadcast(time.monotonic() - begun_s > TRYING_ENOUGH_S)
            return spent

        log(
            f"parallel: each worker may take {gib(capacity.limit)}, of which {gib(capacity.used)} are taken: "
            f"{capacity.where}"
        )
        choice, tried = choose(among, capacity, measure, is_over)
        text = choice.plan.text
        log(f"parallel: {text} is chosen; {len(among) - tried} more plans are not measured")
        _keep(KeptPlan(text, place.world_size), run, peers)
        return replace(config, parallel=text)
    except ConfigError as error:
        raise AgreedRefusal(str(error)) from error
    finally:
        peers.close()


def _recorded(place: RankInfo, run: RunDirectory) -> tuple[KeptPlan | None, str]:
    """The run's choice if it has a state by now, and why it cannot continue if the choice is lost."""
    try:
        if not (place.generation or run.has_checkpoints()):
            # A restart of this job must not take what an earlier one has chosen here.
            if run.kept_plan():
                run.keep_plan(b"")
            return None, ""
        content = run.kept_plan()
        # Without a plan it is a restart before one was chosen; no rank has a state.
        return (KeptPlan.read(content) if content else None), ""
    except (OSError, ValueError) as error:
        return None, (
            f"--parallel auto: the plan of this run cannot be read from {run.plan} ({error}); "
            "restore that file, or give another --out"
        )


def _as_recorded(record: KeptPlan, config: TrainConfig, place: RankInfo, log: Callable[[str], None]) -> str:
    """The recorded plan, or with another number of workers the one that continues its state. Raises PlanError."""
    if record.world_size == place.world_size:
        log(f"parallel: {record.plan}, as this run has chosen")
        return record.plan
    text = resumed(parse(record.plan), place.world_size, config.shape).text
    log(
        f"parallel: {record.plan}, as this run has chosen with {record.world_size} workers; "
        f"for {place.world_size}: {text}"
    )
    return text


def _capacity(device: torch.device, of_node: int, peers: Peers) -> WorkerCapacity:
    """What a worker may take: that of the worker that has least. On CPUs all of a node share a cgroup or the machine.

    Page cache does not count.
    """
    # A barrier: all workers measure at the same point.
    peers.all_reduce_max([0])
    if device.type == "cuda":
        collect(device)
        free, total = torch.cuda.mem_get_info(device)
        where = f"{torch.cuda.get_device_name(device)} has {total / 1e9:.1f} GB"
        own = WorkerCapacity(int(total * (1 - SPARE_SHARE)), total - free, where)
    else:
        node = tightest_capacity()
        own = WorkerCapacity(node.limit // of_node, node.used // of_node, shared_by(of_node, node))
    return min(peers.all_gather(own), key=lambda each: each.limit - each.used)


def _keep(record: KeptPlan, run: RunDirectory, peers: Peers) -> None:
    """Keep the choice before there is a state. All ranks wait until it is written."""
    trouble = ""
    if peers.leads:
        try:
            run.keep_plan(record.content)
        except OSError as error:
            trouble = f"--parallel auto: the choice cannot be kept in {run.plan} ({error.strerror or error})"
    if trouble := peers.broadcast(trouble):
        raise NothingFits(f"{trouble}; make room there, or give {record.plan} in place of {AUTO}")


@dataclass(frozen=True)
class PlanTrial:
    """What a plan took in a few steps: peak GPU memory, and the slowest worker's seconds in the fastest step."""

    memory: int | None
    step_s: float


def try_plan(
    config: TrainConfig,
    sizes: Sizes,
    rank: int,
    device: torch.device,
    peers: Peers,
    *,
    new_gpt: Callable[[], GPT],
    groups: Groups,
) -> PlanTrial:
    """Build the plan of `config`, do a few steps on random text, and discard all of it. Collective.

    The process groups of its axes stay: DTensor caches meshes, and reuses those of an equal mesh.
    """
    link.phase("measuring")
    collect(device)
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    parallel = build(config, new_gpt(), sizes, rank, device, groups)
    # The whole network was there on each worker, and is gone.
    collect(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    order = Order(
        max(4096, config.global_batch),
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        even=config.plan.is_even,
    )
    # As the Keeper warms up.
    for _ in range(passes_to_final_sums([parallel.model], peers.world_size)):
        parallel.warm_up(*_random(config, 1, device))
        parallel.optimizer.zero_grad(set_to_none=True)
    # This allocates the optimizer's moments and DDP's buckets, and compiles.
    _step(parallel, order, 1, config, device)
    finish_device(device)
    link.phase("measuring")
    times_s: list[float] = []
    while len(times_s) < _MEASURED and sum(times_s) < _ENOUGH_S:
        # A barrier: a rank's time must not include another rank's delay.
        peers.all_reduce_max([0])
        begun_s = time.perf_counter()
        _step(parallel, order, len(times_s) + 2, config, device)
        finish_device(device)
        times_s.append(slowest_s(time.perf_counter() - begun_s, peers))
        link.phase("measuring")
    memory: int | None = None
    if device.type == "cuda":
        (memory,) = peers.all_reduce_max([max(0, torch.cuda.max_memory_reserved(device) - before)])
    del parallel
    if config.compile:
        # What was compiled holds parameters.
        torch.compiler.reset()
    collect(device)
    return PlanTrial(memory, min(times_s))


def _step(parallel: Parallel, order: Order, step: int, config: TrainConfig, device: torch.device) -> None:
    for micros in parallel.micro_batches(order, step):
        parallel.backward(*_random(config, len(micros), device), micros)
    parallel.clip(_NORM_MAX)
    parallel.optimizer.step()
    parallel.optimizer.zero_grad(set_to_none=True)


def _random(config: TrainConfig, many: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `many` micro-batches."""
    rows = torch.randint(VOCABULARY, (many * config.micro_batch, config.context + 1), device=device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def collect(device: torch.device) -> None:
    """Free what nothing refers to, also in the caching allocator of a GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
