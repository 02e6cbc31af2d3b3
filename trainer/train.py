"""Train a small GPT on bytes with DDP, from the first rank's hello to the last file: read it from top to bottom.

`train` and `steps` are the whole story in the order in which it happens. What they call lies beside it, one idea per
file: where we are (place), the text (corpus), which windows when (order, batches), the network (model), the group
(group), what is kept (recorder, metrics, checkpoint, rundir), what people see (progress), signals (stop), and the
agent's line (link).
"""

from __future__ import annotations

import math
import sys
import time
from signal import SIGINT, SIGTERM, Signals

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elaunch.trainer import group, link
from elaunch.trainer.batches import Batches
from elaunch.trainer.checkpoint import Checkpoints, tensors_sha256
from elaunch.trainer.config import TrainConfig, UsageError
from elaunch.trainer.corpus import Corpus
from elaunch.trainer.model import GPT
from elaunch.trainer.order import key_of
from elaunch.trainer.place import Place
from elaunch.trainer.progress import Progress, printable
from elaunch.trainer.recorder import Recorder
from elaunch.trainer.rundir import RunDirectory
from elaunch.trainer.stop import StopRequest
from elaunch.trainer.tree import State

SAMPLE_BYTES = 240
GRADIENT_NORM_MAX = 1.0


def train(config: TrainConfig, corpus: Corpus, place: Place, run: RunDirectory) -> int:
    """Run or resume the training that `run` holds; the exit code: 0, or 128 + n where signal n stopped it early.

    Called by every rank with the same arguments but `place`. Raises UsageError where the ranks see different texts.
    """
    device = group.join(place)
    exit_code = steps(config, corpus, place, run, device)
    group.leave(device)
    return exit_code


def steps(config: TrainConfig, corpus: Corpus, place: Place, run: RunDirectory, device: torch.device) -> int:
    """All that happens between joining the group and leaving it; the exit code."""
    tokens = config.global_batch * config.context
    progress = Progress(sys.stderr, steps=config.steps, tokens_per_step=tokens, speaks=place.leads)
    require_same_text(corpus, place, device)
    if any(group.sum_over_ranks([place.leads and run.is_complete], device)):
        progress.say(f"{run.path} is complete: {config.steps} steps; remove it or give another --out to train again")
        return 0

    gpt, model, optimizer = build(config, device)
    checkpoints = Checkpoints(run.checkpoints, generation=place.generation, say=progress.say)
    step, loss = restore(gpt, optimizer, checkpoints)
    batches = Batches(config, corpus, place, device)
    recorder = Recorder(config, place, run, progress, checkpoints, step)
    progress.say(opening(config, corpus, place, gpt, run, step))
    signum = 0

    with StopRequest() as request:
        while step < config.steps and not signum:
            started_s = time.monotonic()
            step += 1

            # Everything random in a step has its own seed, so that no restart can shift it.
            torch.manual_seed(key_of(config.seed, step, place.rank))
            inputs, targets = batches.of_step(step)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
                share_loss: Tensor = model(inputs, targets)
            share_loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), GRADIENT_NORM_MAX)
            optimizer.param_groups[0]["lr"] = learning_rate(config, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            # Notes of signals travel with the loss: all ranks stop after the same step, or none does.
            news = [share_loss.item() / place.world_size, request.signum == SIGTERM, request.signum == SIGINT]
            loss, terminate, interrupt = group.sum_over_ranks(news, device)
            signum = SIGINT if interrupt else SIGTERM if terminate else 0

            link.report(step)
            recorder.step_done(step, loss, time.monotonic() - started_s)
            if step % config.checkpoint_every == 0 or step == config.steps or signum:
                recorder.save(step, loss, gpt, optimizer)
        checkpoints.wait()

    if step < config.steps:
        progress.say(f"stopped by {Signals(signum).name} after step {step}; the same command goes on from there")
        return 128 + signum
    held_out = held_out_loss(gpt, batches, device)
    if place.leads:
        finish(run, config, place, gpt, loss, held_out, progress)
    return 0


def require_same_text(corpus: Corpus, place: Place, device: torch.device) -> None:
    """Raise UsageError on a rank whose text is not rank 0's: the nodes may have different Pythons or disks."""
    theirs = group.from_rank_0(corpus.summary.encode(), device).decode()
    if corpus.summary != theirs:
        raise UsageError(
            f"the text below {corpus.root} ({corpus.summary}) is not rank 0's ({theirs}); give all the same --data"
        )


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step 1…steps: linear up over the first tenth (200 steps at most), then a cosine to a tenth."""
    warm_up_steps = max(1, min(200, config.steps // 10))
    if step <= warm_up_steps:
        return config.learning_rate * step / warm_up_steps
    done = (step - warm_up_steps) / (config.steps - warm_up_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def build(config: TrainConfig, device: torch.device) -> tuple[GPT, DistributedDataParallel, AdamW]:
    """The model, the same on every rank; DDP around it, warmed up; the optimizer."""
    torch.manual_seed(config.seed)
    gpt = GPT(
        layers=config.layers, heads=config.heads, width=config.width, context=config.context, dropout=config.dropout
    ).to(device)
    gpu_ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(gpt, device_ids=gpu_ids, gradient_as_bucket_view=True)
    # At every start, and before anything is restored: see warm_up.
    dummy = torch.zeros((1, config.context), dtype=torch.int64, device=device)
    group.warm_up(model, dummy, dummy)
    return gpt, model, AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def restore(gpt: GPT, optimizer: AdamW, checkpoints: Checkpoints) -> tuple[int, float]:
    """Put the newest checkpoint into model and optimizer: its step, and that step's loss; 0 where there is none."""
    # The model's tensors are filled in place, on every rank.
    state: State = {"model": gpt.state_dict()}
    if checkpoints.load_newest(state) is None:
        return 0, math.nan
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["loss"]


@torch.no_grad()
def held_out_loss(gpt: GPT, batches: Batches, device: torch.device) -> float:
    """Nats per byte on text that was never trained on; every rank computes its part and gets the mean of all."""
    gpt.eval()
    losses = [gpt(inputs, targets).item() for inputs, targets in batches.held_out()]
    total, count = group.sum_over_ranks([sum(losses), len(losses)], device)
    return total / count


def finish(
    run: RunDirectory, config: TrainConfig, place: Place, gpt: GPT, loss: float, held_out: float, progress: Progress
) -> None:
    """Show what the model has learnt, and write `result.json`, whose presence makes the run complete."""
    sample = gpt.write(b"\n", SAMPLE_BYTES, seed=config.seed)
    progress.say(f"done: {config.steps} steps, loss {loss:.3f}, held-out loss {held_out:.3f} nats per byte; {run.path}")
    print(f"--- a sample of what it writes ---\n{printable(sample)}\n---", flush=True)
    run.write_result(
        {
            "steps": config.steps,
            "loss": loss,
            "params_sha256": tensors_sha256(gpt.state_dict().values()),
            "restarts": place.restarts,
            "world_size": place.world_size,
            "held_out_loss": held_out,
        }
    )


def opening(config: TrainConfig, corpus: Corpus, place: Place, gpt: GPT, run: RunDirectory, step: int) -> str:
    """What is about to happen, in one sentence."""
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    share = config.global_batch // place.world_size
    files = f"the first {len(corpus.files):,}" if corpus.truncated else f"{len(corpus.files):,}"
    resumed = f"resuming after step {step} of" if step else "training for"
    return (
        f"{resumed} {config.steps} steps: {parameters:,} parameters, {place.world_size} × {share} windows of "
        f"{config.context} bytes, {files} files ({corpus.size / 1e6:.1f} MB) below {corpus.root}; run in {run.path}"
    )
