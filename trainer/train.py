"""Train a small GPT on bytes of text: read it from top to bottom.

`train_in_group` is the training: data, model, optimizer, loop, evaluation. The functions that it calls follow in the
same order. What is not about training is elsewhere: the options (gpt/config), the network (gpt/model), how the workers
share it (parallel/), the text (gpt/corpus), and all that a run writes and prints (gpt/recorder). Two classes of elaunch
make the run survive failures: Keeper, which keeps the state, and Order, which has the windows of each step.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# DDP and optimizers import it anyway. If it is first imported while a group exists, it keeps that group alive.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from elaunch.trainer import link
from elaunch.trainer.data.order import Micro, Order
from elaunch.trainer.gpt.config import AgreedRefusal, RunDirectory, TrainConfig
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.gpt.recorder import Recorder, opening
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.parallel.build import Parallel, build, chosen
from elaunch.trainer.parallel.plan import DataShare
from elaunch.trainer.parallel.whole import Whole, hook_state, in_ddp
from elaunch.trainer.profiling.profiler import profiled
from elaunch.trainer.ranks import RankInfo
from elaunch.trainer.state.tree import tensors_sha256
from elaunch.trainer.tuning import tune

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
GRADIENT_NORM_MAX = 1.0
HELD_OUT_WINDOWS_MAX = 96


def train(config: TrainConfig, corpus: Corpus, place: RankInfo, run: RunDirectory) -> int:
    """Run or resume the training in `run`. Returns the exit code: 0, or 128 + n if signal n stopped it early.

    Called by every rank with the same arguments but `place`. Raises ConfigError if the ranks read different texts.
    """
    device = join(place)
    exit_code = 0
    try:
        train_in_group(config, corpus, place, run, device)
    except SystemExit as stop:
        # Raised by the Keeper on all ranks after the same step: nodes join or leave, or the job is to stop.
        exit_code = int(stop.code or 0)
    except AgreedRefusal:
        leave(device)
        raise
    leave(device)
    return exit_code


def join(place: RankInfo) -> torch.device:
    """Join the process group. Returns this rank's device.

    With GPUs it is `cuda:<local_rank>` with NCCL, else the CPU with gloo. Without a launcher the group has one process.
    """
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone: dict[str, Any] = {} if place.launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(backend, **alone)
    return device


def leave(device: torch.device) -> None:
    """Wait for all ranks, then destroy the group, whose threads exit only if nothing refers to its models.

    A thread that releases a tensor while Python shuts down aborts the process (pytorch #190489).
    """
    together = torch.zeros((), device=device)
    dist.all_reduce(together)
    together.item()
    gc.collect()
    # gloo's thread drops PowerSGD's callbacks. As the group's last owner it would join itself, and abort the process.
    time.sleep(0.01)
    dist.destroy_process_group()


def train_in_group(
    config: TrainConfig, corpus: Corpus, place: RankInfo, run: RunDirectory, device: torch.device
) -> None:
    """All that happens between joining the group and leaving it."""
    log: Callable[[str], None] = (
        functools.partial(print, file=sys.stderr, flush=True) if place.leads else lambda _: None
    )
    of_rank_0 = [corpus.summary, run.is_complete]
    dist.broadcast_object_list(of_rank_0, device=device)
    summary, is_complete = of_rank_0
    corpus.require_same(str(summary))
    if is_complete:
        log(f"{run.path} is complete: {config.steps} steps; remove it or give another --out to train again")
        return

    if config.plan.is_auto:
        untrained = functools.partial(new_gpt, config, device)
        config = chosen(config, place, run, device, new_gpt=untrained, groups=decay_groups, log=log)

    # The workers that share one model read the same windows.
    sizes = config.sizes(place)
    share = sizes.share(place.rank)
    windows = Windows(config, corpus, share, device)
    gpt = new_gpt(config, device)
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    parallel = build(config, gpt, sizes, place.rank, device, decay_groups)
    del gpt
    optimizer = parallel.optimizer
    recorder = Recorder(config, place, run, log, device, share=share)

    def warm_up() -> None:
        """Before a restore, let DDP rebuild its buckets and the compiler compile."""
        parallel.warm_up(*windows.dummy())

    if config.tune_comm and isinstance(parallel, Whole):
        parallel.model = tune(
            parallel.gpt,
            lambda model: parallel.warm_up(*windows.dummy(), model),
            wrap=functools.partial(in_ddp, device=device, hook=config.comm_hook),
            folder=run.path / "tuning",
            log=log,
        )

    # Restores the newest state from any source, and keeps it from now on.
    with (
        Keeper(
            parallel.model,
            optimizer,
            extra=recorder.state,
            hook_state=hook_state(parallel.model),
            checkpoints=run.checkpoints,
            checkpoint_every=config.checkpoint_every,
            lose_at_most=config.lose_at_most,
            warm_up=warm_up,
            # config.yaml identifies the training.
            name="gpt",
            log=log if place.leads else None,
        ) as keeper,
        recorder.begin(keeper, windows.order),
    ):
        log(opening(config, corpus, place, run, parameters, keeper.step))
        for step in profiled(keeper.steps(config.steps), config.profile, folder=run.profile, log=log):
            # At the beginning of the step: a restart, which repeats the step, evaluates again.
            is_due = config.eval_every is not None and (step - 1) % config.eval_every == 0
            held_out = held_out_loss(parallel, windows) if is_due else None
            rate = learning_rate(config, step)

            loss = torch.zeros((), device=device)
            # One micro-batch at a time, or all in a pipeline. This seeds their random numbers, which neither a restart
            # nor another world size may change.
            for micros in parallel.micro_batches(windows.order, step):
                recorder.computes(step, micros)
                loss += parallel.backward(*windows.of(step, micros), micros)
            grad_norm = parallel.clip(GRADIENT_NORM_MAX)
            # The mean over all ranks. It stays on the device until the log reads it.
            mean_loss = recorder.mean_loss(loss)

            with keeper.commit():
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                recorder.keep(step, loss=mean_loss, grad_norm=grad_norm, learning_rate=rate, held_out=held_out)
            recorder.step_done(step)

    last_held_out = held_out_loss(parallel, windows)
    # Collective: no rank has more than one whole parameter at a time.
    digest = tensors_sha256(weight for _, weight in parallel.weights())
    if place.leads:
        recorder.finish(last_held_out.item(), digest)


class Windows:
    """The text in disjoint windows of `context + 1` bytes: `context` inputs, and targets shifted by one byte.

    Inputs and targets are (windows, context) int64 on `device`, values 0..255. `order` has the windows of each step:
    each once per epoch, the same for any number of workers.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, share: DataShare, device: torch.device) -> None:
        self._config, self._corpus, self._share, self._device = config, corpus, share, device
        self._length = config.context + 1
        self.order = Order(
            corpus.held_out_start // self._length,
            seed=config.seed,
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            # A forward pass of FSDP is a collective: a rank with fewer micro-batches computes one that does not count.
            even=config.plan.is_even,
        )

    def of(self, step: int, micros: Sequence[Micro]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of micro-batches, one after the other."""
        positions = [position for micro in micros for position in self.order.loaded(step, micro.number)]
        return self._read([self.order.sample(position) * self._length for position in positions])

    def dummy(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the right shape."""
        return self._read([0] * self._config.micro_batch)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """This replica's part of the held-out windows, the same in every run: inputs, targets, and a weight.

        The weights of all replicas add up to 1. All get the same number of batches; a surplus one has weight 0.
        """
        start, size, world_size = self._corpus.held_out_start, self._config.micro_batch, self._share.world_size
        there = (self._corpus.size - start) // self._length
        used = min(there, HELD_OUT_WINDOWS_MAX)
        starts = [start + (number * there // used) * self._length for number in range(used)]
        batches = [starts[first : first + size] for first in range(0, used, size)]
        for number in range(self._share.rank, -(-len(batches) // world_size) * world_size, world_size):
            batch = batches[number % len(batches)]
            yield *self._read(batch), len(batch) / used if number < len(batches) else 0.0

    def _read(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        text = bytearray().join(self._corpus.read(start, self._length) for start in starts)
        rows = torch.frombuffer(text, dtype=torch.uint8).view(len(starts), self._length)
        if self._device.type == "cuda":
            # Copies from pinned memory are asynchronous.
            rows = rows.pin_memory()
        rows = rows.to(self._device, non_blocking=True).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def new_gpt(config: TrainConfig, device: torch.device) -> GPT:
    """An untrained network, the same on every rank."""
    torch.manual_seed(config.seed)
    shape = {"layers": config.layers, "heads": config.heads, "width": config.width, "context": config.context}
    return GPT(**shape, dropout=config.dropout).to(device)


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices, none for parameters of fewer than two dimensions: biases and the norms' weights."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": WEIGHT_DECAY, "betas": BETAS},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0, "betas": BETAS},
    ]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a step: linear warm-up over the first tenth (200 steps at most), then cosine decay to a tenth."""
    warm_up_steps = max(1, min(200, config.steps // 10))
    if step <= warm_up_steps:
        return config.learning_rate * step / warm_up_steps
    done = (step - warm_up_steps) / (config.steps - warm_up_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def held_out_loss(parallel: Parallel, windows: Windows) -> Tensor:
    """Nats per byte on text that is never trained on, the same number on every rank. Collective."""
    link.phase("evaluating")
    parallel.gpt.eval()
    parts = [parallel.loss(inputs, targets) * weight for inputs, targets, weight in windows.held_out()]
    parallel.gpt.train()
    loss = torch.stack(parts).sum()
    dist.all_reduce(loss)
    return loss
