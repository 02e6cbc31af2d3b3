"""Train a small GPT on bytes with DDP, from the first rank's hello to the last file: read it from top to bottom.

`train` and `steps` are the whole story in the order in which it happens. What they call lies beside it, one idea per
file: where we are (place), the text (corpus), which windows when (order, batches), the network (model), the group
(group), who adds which gradients (accumulation), the state that no failure may cost (keeper), what is left behind
(recorder, metrics, ledger, rundir), what people see (progress), and the agent's line (link).
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elaunch.trainer import link
from elaunch.trainer.checkpoint.checkpoints import tensors_sha256
from elaunch.trainer.data.accumulation import accumulate
from elaunch.trainer.gpt.batches import CorpusBatches
from elaunch.trainer.gpt.config import ConfigError, TrainConfig
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.gpt.progress import Progress, printable
from elaunch.trainer.gpt.recorder import Recorder
from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.ledger.ledger import audit_folder
from elaunch.trainer.ranks import process_group
from elaunch.trainer.ranks.place import RankInfo

SAMPLE_BYTES = 240
GRADIENT_NORM_MAX = 1.0


def train(config: TrainConfig, corpus: Corpus, place: RankInfo, run: RunDirectory) -> int:
    """Run or resume the training that `run` holds; the exit code: 0, or 128 + n where signal n stopped it early.

    Called by every rank with the same arguments but `place`. Raises ConfigError where the ranks see different texts.
    """
    device = process_group.join(place)
    exit_code = 0
    try:
        steps(config, corpus, place, run, device)
    except SystemExit as stop:
        # The keeper's, on all ranks after the same step: nodes come or go, or somebody wants the job to end.
        exit_code = int(stop.code or 0)
    process_group.leave(device)
    return exit_code


def steps(config: TrainConfig, corpus: Corpus, place: RankInfo, run: RunDirectory, device: torch.device) -> None:
    """All that happens between joining the group and leaving it."""
    tokens = config.global_batch * config.context
    progress = Progress(sys.stderr, steps=config.steps, tokens_per_step=tokens, speaks=place.leads)
    require_same_text(corpus, place, device)
    if any(process_group.sum_over_ranks([place.leads and run.is_complete], device)):
        progress.say(f"{run.path} is complete: {config.steps} steps; remove it or give another --out to train again")
        return

    gpt, model, optimizer = build(config, device)
    batches = CorpusBatches(config, corpus, place, device)
    recorder = Recorder(config, place, run, progress, device)
    # Restores the newest state that is anywhere, and keeps it from now on.
    with Keeper(
        model,
        optimizer,
        extra=recorder.state,
        checkpoints=run.checkpoints,
        checkpoint_every=config.checkpoint_every,
        snapshot_every=config.snapshot_every,
        warm_up=lambda: dummy_backward(model, config, device),
        say=progress.say if place.leads else None,
    ) as keeper:
        progress.say(opening(config, corpus, place, gpt, run, keeper.step))
        with recorder.begin(keeper, batches.order):
            for step in keeper.steps(config.steps):
                share_loss = torch.zeros((), device=device)
                # Seeds all that is random in a micro-batch: neither a restart nor another world size shifts it.
                for micro in accumulate(model, batches.order, step, place.rank, place.world_size):
                    recorder.computes(step, micro)
                    inputs, targets = batches.read(micro.samples)
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
                        loss_part: Tensor = model(inputs, targets) * micro.weight
                    loss_part.backward()  # type: ignore[no-untyped-call]
                    share_loss += loss_part.detach()
                torch.nn.utils.clip_grad_norm_(gpt.parameters(), GRADIENT_NORM_MAX)
                loss = recorder.mean_loss(share_loss.item())

                with keeper.commit():
                    optimizer.param_groups[0]["lr"] = learning_rate(config, step)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    recorder.keep(step, loss)
                recorder.step_done(step)

    link.phase("evaluating")
    held_out = held_out_loss(gpt, batches, device)
    if place.leads:
        finish(run, config, place, gpt, recorder, held_out, progress)


def require_same_text(corpus: Corpus, place: RankInfo, device: torch.device) -> None:
    """Raise ConfigError on a rank whose text is not rank 0's: the nodes may have different Pythons or disks."""
    theirs = process_group.from_rank_0(corpus.summary.encode(), device).decode()
    if corpus.summary != theirs:
        raise ConfigError(
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
    """The model, the same on every rank; DDP around it; the optimizer."""
    torch.manual_seed(config.seed)
    gpt = GPT(
        layers=config.layers, heads=config.heads, width=config.width, context=config.context, dropout=config.dropout
    ).to(device)
    gpu_ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(gpt, device_ids=gpu_ids, gradient_as_bucket_view=True)
    return gpt, model, AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def dummy_backward(model: DistributedDataParallel, config: TrainConfig, device: torch.device) -> None:
    """Forward and backward of anything: DDP settles in which order it sums gradients, before a state is restored."""
    dummy = torch.zeros((1, config.context), dtype=torch.int64, device=device)
    model(dummy, dummy).backward()


@torch.no_grad()
def held_out_loss(gpt: GPT, batches: CorpusBatches, device: torch.device) -> float:
    """Nats per byte on text that was never trained on; every rank computes its part and gets the mean of all."""
    gpt.eval()
    losses = [gpt(inputs, targets).item() for inputs, targets in batches.held_out()]
    total, count = process_group.sum_over_ranks([sum(losses), len(losses)], device)
    return total / count


def finish(
    run: RunDirectory,
    config: TrainConfig,
    place: RankInfo,
    gpt: GPT,
    recorder: Recorder,
    held_out: float,
    progress: Progress,
) -> None:
    """Show what the model has learnt, and write `result.json`, whose presence makes the run complete."""
    sample, loss = gpt.write(b"\n", SAMPLE_BYTES, seed=config.seed), recorder.loss
    progress.say(f"done: {config.steps} steps, loss {loss:.3f}, held-out loss {held_out:.3f} nats per byte; {run.path}")
    print(f"--- a sample of what it writes ---\n{printable(sample)}\n---", flush=True)
    ledger = audit_folder(run.ledger, steps=config.steps).text if config.ledger else None
    if ledger is not None:
        progress.say(f"ledger: {ledger}")
    run.write_result(
        {
            "steps": config.steps,
            "loss": loss,
            "params_sha256": tensors_sha256(gpt.state_dict().values()),
            "restarts": place.restarts,
            "world_size": place.world_size,
            "held_out_loss": held_out,
            "steps_lost": recorder.steps_lost,
            # A run that has all its steps has computed each lost one again.
            "steps_repeated": recorder.steps_lost,
            "samples_seen": recorder.state["samples_seen"],
            "ledger": ledger,
        }
    )


def opening(config: TrainConfig, corpus: Corpus, place: RankInfo, gpt: GPT, run: RunDirectory, step: int) -> str:
    """What is about to happen, in one sentence."""
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    many = config.global_batch // config.micro_batch
    files = f"the first {len(corpus.files):,}" if corpus.truncated else f"{len(corpus.files):,}"
    resumed = f"resuming after step {step} of" if step else "training for"
    return (
        f"{resumed} {config.steps} steps: {parameters:,} parameters, {many} × {config.micro_batch} windows of "
        f"{config.context} bytes on {place.world_size} worker{'s' * (place.world_size != 1)}, {files} files "
        f"({corpus.size / 1e6:.1f} MB) below {corpus.root}; run in {run.path}"
    )
