"""Plans: what they mean, what is refused, and what a restart with another number of workers makes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from elaunch.trainer.parallel.plan import (
    DataShare,
    ParallelPlan,
    PlanError,
    Shape,
    Sizes,
    fit,
    layers_of,
    parse,
    require_fitting,
    stages,
)

SHAPE = Shape(layers=4, heads=4, width=128, context=64, global_batch=24, micro_batch=3)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("ddp", ParallelPlan("ddp", "ddp")),
        ("hsdp", ParallelPlan("hsdp", "hsdp")),
        ("fsdp=4", ParallelPlan("fsdp=4", "fsdp2", fsdp=4)),
        ("dp=2,fsdp=4", ParallelPlan("dp=2,fsdp=4", "hsdp", dp=2, fsdp=4)),
        ("fsdp=2,tp=2", ParallelPlan("fsdp=2,tp=2", "fsdp2", fsdp=2, tp=2)),
        ("dp=2,tp=2,pp=2", ParallelPlan("dp=2,tp=2,pp=2", "ddp", dp=2, tp=2, pp=2)),
        ("pp=4,schedule=gpipe", ParallelPlan("pp=4,schedule=gpipe", "ddp", pp=4, schedule="gpipe")),
    ],
)  # fmt: skip
def test_a_plan_is_a_name_or_the_numbers_of_workers_along_axes(text: str, plan: ParallelPlan) -> None:
    assert parse(text) == plan


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fsdp3", "there is no plan 'fsdp3'; use one of ddp, zero1, zero2, fsdp2, hsdp, auto, or the number"),
        ("tp=2,shedule=gpipe", "there is no plan 'shedule=gpipe'; use"),
        ("dp=2,,tp=2", "there is no plan ''; use"),
        ("tp=2,tp=4", "tp is given twice; leave one out"),
        ("tp=²", "there is no plan 'tp=²'; use"),
        ("pp=2,schedule=1fb1", "with pp a schedule=gpipe|1f1b|interleaved"),
        ("tp=2,schedule=gpipe", "schedule belongs to a pipeline; add pp=2 or more, or leave schedule out"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_with_the_way_out(text: str, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)

    assert sentence in str(caught.value)
    assert f"--parallel {text}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "workers", "sentence"),
    [
        ("dp=2,tp=2", 8, "is for 4 workers, and there are 8; use numbers for dp and fsdp whose product is 4"),
        ("tp=2,pp=2", 6, "divides one model among 4 workers, and 6 workers cannot be divided so; start 4 or 8 workers"),
        ("tp=4", 1, "divides one model among 4 workers, and 1 worker cannot be divided so; start 4 workers"),
        ("hsdp", 3, "is for 6 workers, and there are 3; use numbers"),
    ],
)
def test_a_plan_for_another_number_of_workers_is_refused_at_the_first_start(
    text: str, workers: int, sentence: str
) -> None:
    with pytest.raises(PlanError) as caught:
        fit(parse(text), workers)

    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp=4", [Sizes(dp=4), Sizes(dp=2), Sizes(dp=4)]),
        ("fsdp=4", [Sizes(fsdp=4), Sizes(fsdp=2), Sizes(fsdp=4)]),
        ("hsdp", [Sizes(dp=2, fsdp=2), Sizes(dp=2, fsdp=1), Sizes(dp=2, fsdp=2)]),
        ("dp=2,fsdp=2", [Sizes(dp=2, fsdp=2), Sizes(dp=1, fsdp=2), Sizes(dp=2, fsdp=2)]),
        ("dp=2,tp=2", [Sizes(dp=2, tp=2), Sizes(dp=1, tp=2), Sizes(dp=2, tp=2)]),
        ("fsdp=2,pp=2", [Sizes(fsdp=2, pp=2), Sizes(fsdp=1, pp=2), Sizes(fsdp=2, pp=2)]),
    ],
)
def test_at_a_restart_the_data_axes_follow_the_number_of_workers_and_the_models_stay(
    text: str, sizes: list[Sizes]
) -> None:
    plan = parse(text)

    assert [fit(plan, workers, again=generation > 0) for generation, workers in enumerate((4, 2, 4))] == sizes


def test_a_restart_that_would_break_a_model_apart_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="cannot be divided so; a run that continues keeps its tp and pp here; start 4"):
        fit(parse("tp=2,pp=2"), 2, again=True)

    assert fit(parse("hsdp"), 3, again=True) == Sizes(dp=1, fsdp=3)
    assert fit(parse("dp=2,fsdp=2"), 3, again=True) == Sizes(dp=1, fsdp=3)


@pytest.mark.parametrize(
    "sizes", [Sizes(dp=4), Sizes(dp=2, tp=2), Sizes(fsdp=2, pp=2), Sizes(dp=2, fsdp=2, tp=2, pp=3), Sizes(tp=4)]
)
def test_the_workers_of_a_replica_have_one_share_and_one_of_them_leads(sizes: Sizes) -> None:
    workers = sizes.data * sizes.tp * sizes.pp

    shares = [sizes.share(rank) for rank in range(workers)]

    assert shares[0] == DataShare(0, sizes.data, leads=True)
    assert Counter(share.rank for share in shares) == dict.fromkeys(range(sizes.data), sizes.tp * sizes.pp)
    assert sorted(share.rank for share in shares if share.leads) == list(range(sizes.data))
    # Neighbours share a model, and stages are far apart.
    assert len({shares[rank].rank for rank in range(sizes.tp)}) == 1


def test_runs_are_the_same_if_their_state_is_cut_in_the_same_way() -> None:
    alike = [
        ("ddp", "dp=2"),
        ("zero1",),
        ("fsdp2", "zero2", "hsdp", "fsdp=2", "dp=2,fsdp=2"),
        ("tp=2", "dp=2,tp=4", "fsdp=2,tp=2"),
        ("pp=2", "dp=8,pp=4,schedule=gpipe", "fsdp=2,pp=2"),
        ("tp=2,pp=2", "dp=2,tp=4,pp=2"),
    ]

    found = [{parse(text).identity for text in texts} for texts in alike]

    assert [len(identities) for identities in found] == [1] * len(alike)
    assert len(set.union(*found)) == len(alike)


@pytest.mark.parametrize(
    ("text", "workers", "shape", "sentence"),
    [
        ("tp=3", 3, {"heads": 4}, "--heads (4) is not divisible by tp (3); use --heads 6, or"),
        ("tp=4", 4, {"context": 66}, "--context (66) is not divisible by tp (4); use --context 68, or"),
        ("fsdp=3,tp=2", 6, {}, "--width (128) is not divisible by tp × fsdp (6); use --width 132"),
        (
            "pp=4,schedule=interleaved",
            4,
            {},
            "the pipeline has 8 stages (2 on each worker), and the network --layers 4; use --layers 8",
        ),
        ("dp=8,pp=2", 16, {}, "1f1b needs at least as many micro-batches per replica and step as pp (2), and has 1;"),
        (
            "pp=2,schedule=interleaved",
            2,
            {"global_batch": 15},
            "interleaved cannot divide 5 micro-batches into 2 rounds of equal length; use",
        ),
    ],
)  # fmt: skip
def test_what_an_axis_cannot_divide_is_one_sentence_with_the_way_out(
    text: str, workers: int, shape: dict[str, int], sentence: str
) -> None:
    plan = parse(text)

    with pytest.raises(PlanError) as caught:
        require_fitting(plan, fit(plan, workers), replace(SHAPE, **shape))

    assert str(caught.value).startswith(f"--parallel {text}:")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "layers"), [("pp=3", 7), ("pp=2,schedule=interleaved", 6), ("dp=2", 3)])
def test_each_layer_is_in_one_stage_and_stages_differ_by_one_layer_at_most(text: str, layers: int) -> None:
    plan = parse(text)

    parts = [layers_of(stage, plan, layers) for stage in range(stages(plan))]

    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
