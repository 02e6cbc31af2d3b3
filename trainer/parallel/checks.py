"""Whether a plan fits the network and the batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elaunch.trainer.parallel.plan import ParallelPlan, PlanError, Sizes


@dataclass(frozen=True)
class Shape:
    """What of the network and of the batch a plan divides."""

    layers: int
    heads: int
    width: int
    context: int
    global_batch: int
    micro_batch: int


def require_fitting(plan: ParallelPlan, sizes: Sizes, shape: Shape) -> None:
    """Raise PlanError with the values and the way out if an axis does not divide what it must."""
    if sizes.tp > 1:
        _require_tensor_parallel(plan, sizes, shape)
    if sizes.pp > 1:
        _require_layers(plan, shape)
        _require_microbatches(plan, sizes, shape)


def stages(plan: ParallelPlan) -> int:
    """The number of parts into which the pipeline divides the layers."""
    return plan.pp * plan.stages_per_worker


def layers_of(stage: int, plan: ParallelPlan, layers: int) -> range:
    """The layers of that stage. They are contiguous, and the numbers of two stages' layers differ by at most one."""
    many = stages(plan)
    return range(layers * stage // many, layers * (stage + 1) // many)


def microbatches(plan: ParallelPlan, sizes: Sizes, shape: Shape) -> int:
    """How many micro-batches the pipeline of one replica computes in a step."""
    return plan.microbatches or _micro_batches_of_data(sizes, shape)


def windows_of_microbatch(plan: ParallelPlan, sizes: Sizes, shape: Shape) -> int:
    """The windows in one of them."""
    return _micro_batches_of_data(sizes, shape) * shape.micro_batch // microbatches(plan, sizes, shape)


def _micro_batches_of_data(sizes: Sizes, shape: Shape) -> int:
    return -(-shape.global_batch // shape.micro_batch // sizes.data)


def _require_tensor_parallel(plan: ParallelPlan, sizes: Sizes, shape: Shape) -> None:
    tp = sizes.tp
    for option, number in (("--heads", shape.heads), ("--context", shape.context)):
        if number % tp:
            raise PlanError(
                f"--parallel {plan.text}: {option} ({number}) is not divisible by tp ({tp}); use "
                f"tp={_divisor(number, tp)} or {option} {_multiple(number, tp)}"
            )
    if shape.width % (tp * sizes.fsdp):
        raise PlanError(
            f"--parallel {plan.text}: --width ({shape.width}) is not divisible by tp × fsdp ({tp} × {sizes.fsdp}); "
            f"use --width {_multiple(shape.width, tp * sizes.fsdp)} or another plan"
        )


def _require_layers(plan: ParallelPlan, shape: Shape) -> None:
    if stages(plan) > shape.layers:
        each = f", {plan.stages_per_worker} on each worker" if plan.stages_per_worker > 1 else ""
        raise PlanError(
            f"--parallel {plan.text}: the pipeline has {stages(plan)} stages{each}, and the network only "
            f"{shape.layers} layer{'s' * (shape.layers != 1)}; use --layers {stages(plan)}, or a smaller pp"
        )


def _require_microbatches(plan: ParallelPlan, sizes: Sizes, shape: Shape) -> None:
    many = microbatches(plan, sizes, shape)
    windows = _micro_batches_of_data(sizes, shape) * shape.micro_batch
    where = f"--parallel {plan.text}:"
    if windows % many:
        raise PlanError(
            f"{where} the {windows} windows of a replica and step cannot be divided into {many} micro-batches; "
            f"use microbatches={_divisor(windows, many)}"
        )
    if plan.schedule != "gpipe" and many < plan.pp:
        raise PlanError(
            f"{where} {plan.schedule} needs at least as many micro-batches per replica and step as pp ({plan.pp}), and "
            f"there {'is' if many == 1 else 'are'} {many}; use a smaller --micro-batch, a larger --global-batch, or "
            "schedule=gpipe"
        )
    # torch computes as many micro-batches of one stage after the other as there are stages, in rounds of one length.
    if plan.schedule == "interleaved" and many % (many // plan.pp):
        raise PlanError(
            f"{where} interleaved divides {many} micro-batches into {many // plan.pp} rounds of equal length, and "
            f"cannot; use a number of micro-batches that pp ({plan.pp}) divides, or schedule=1f1b"
        )


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(divisor for divisor in range(min(most, number), 0, -1) if number % divisor == 0)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
