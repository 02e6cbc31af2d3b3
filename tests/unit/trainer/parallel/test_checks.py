"""Whether a plan fits the network and the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.trainer.parallel.checks import (
    Shape,
    layers_of,
    microbatches,
    require_fitting,
    stages,
    windows_of_microbatch,
)
from elaunch.trainer.parallel.plan import PlanError, Sizes, fit, parse

SHAPE = Shape(layers=4, heads=4, width=128, context=64, global_batch=24, micro_batch=3)


def refusal(text: str, workers: int, shape: Shape) -> str:
    plan = parse(text)
    with pytest.raises(PlanError) as caught:
        require_fitting(plan, fit(plan, workers), shape)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "workers", "shape", "sentence"),
    [
        ("tp=3", 3, {"heads": 4}, "--heads (4) is not divisible by tp (3); use tp=2 or --heads 6"),
        ("tp=4", 4, {"context": 66}, "--context (66) is not divisible by tp (4); use tp=3 or --context 68"),
        ("fsdp=3,tp=2", 6, {}, "--width (128) is not divisible by tp × fsdp (2 × 3); use --width 132"),
        ("pp=5", 5, {}, "the pipeline has 5 stages, and the network only 4 layers; use --layers 5, or a smaller pp"),
        (
            "pp=4,schedule=interleaved",
            4,
            {},
            "the pipeline has 8 stages, 2 on each worker, and the network only 4 layers; use --layers 8",
        ),
        ("pp=2,microbatches=5", 2, {}, "the 24 windows of a replica and step cannot be divided into 5 micro-batches; "
         "use microbatches=4"),
        ("dp=8,pp=2", 16, {}, "1f1b needs at least as many micro-batches per replica and step as pp (2), and there is"),
        ("pp=4,microbatches=2", 4, {}, "as pp (4), and there are 2; use a smaller --micro-batch"),
        (
            "pp=2,microbatches=6,schedule=interleaved,dp=1",
            2,
            {"global_batch": 10, "micro_batch": 2},
            "cannot be divided into 6",
        ),
        (
            "pp=2,schedule=interleaved",
            2,
            {"global_batch": 15},
            "interleaved divides 5 micro-batches into 2 rounds of equal length, and cannot",
        ),
    ],
)  # fmt: skip
def test_what_an_axis_cannot_divide_is_one_sentence_with_the_way_out(
    text: str, workers: int, shape: dict[str, int], sentence: str
) -> None:
    said = refusal(text, workers, replace(SHAPE, **shape))

    assert sentence in said
    assert said.startswith(f"--parallel {text}:")


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("ddp", 5), ("fsdp2", 7), ("hsdp", 6), ("tp=4", 4), ("dp=2,tp=2", 4), ("pp=4", 4),
        ("dp=8,pp=2,schedule=gpipe", 16),
        ("pp=2,schedule=interleaved", 2), ("dp=2,tp=2,pp=2", 8), ("pp=2,microbatches=24", 2),
    ],
)  # fmt: skip
def test_a_plan_that_fits_is_not_refused(text: str, workers: int) -> None:
    plan = parse(text)

    require_fitting(plan, fit(plan, workers), SHAPE)


@pytest.mark.parametrize(("text", "layers"), [("pp=2", 5), ("pp=3", 7), ("pp=2,schedule=interleaved", 6), ("dp=2", 3)])
def test_each_layer_is_in_one_stage_and_stages_differ_by_one_layer_at_most(text: str, layers: int) -> None:
    plan = parse(text)

    parts = [layers_of(stage, plan, layers) for stage in range(stages(plan))]

    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_pipelines_micro_batches_are_those_of_the_data_unless_their_number_is_given() -> None:
    plan, given = parse("pp=2"), parse("pp=2,microbatches=4")

    # 8 micro-batches of 3 windows; of three replicas one computes 2 of them and one that does not count.
    assert [microbatches(plan, Sizes(dp=dp, pp=2), SHAPE) for dp in (1, 2, 3)] == [8, 4, 3]
    assert [windows_of_microbatch(plan, Sizes(dp=dp, pp=2), SHAPE) for dp in (1, 2, 3)] == [3, 3, 3]
    assert (microbatches(given, Sizes(pp=2), SHAPE), windows_of_microbatch(given, Sizes(pp=2), SHAPE)) == (4, 6)
