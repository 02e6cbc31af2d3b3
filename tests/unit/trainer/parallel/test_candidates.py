"""The plans that auto chooses among fit the workers, the network, the batch and the other options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.trainer.parallel.candidates import WorkerCount, candidates, successors
from elaunch.trainer.parallel.checks import Shape, require_fitting
from elaunch.trainer.parallel.plan import PlanError, fit, parse

SHAPE = Shape(layers=4, heads=4, width=64, context=32, global_batch=32, micro_batch=2)


def texts(number: int, of_node: int | None = None, shape: Shape = SHAPE, **options: bool) -> list[str]:
    return [each.text for each in candidates(WorkerCount(number, of_node or number), shape, **options)]


def test_one_worker_has_one_plan() -> None:
    assert texts(1) == ["ddp"]


def test_two_workers_have_all_kinds_and_the_plainest_comes_first() -> None:
    found = texts(2)

    assert found[:4] == ["ddp", "zero1", "zero2", "fsdp2"]
    assert {"tp=2", "pp=2,schedule=1f1b", "pp=2,schedule=interleaved"} <= {*found}


@pytest.mark.parametrize(("number", "nodes"), [(2, 1), (3, 1), (4, 1), (8, 1), (4, 2), (6, 2), (8, 2), (6, 3), (12, 3)])
def test_each_plan_uses_all_workers_once_and_passes_the_checks(number: int, nodes: int) -> None:
    found = candidates(WorkerCount(number, number // nodes), SHAPE)

    assert len({each.text for each in found}) == len(found)
    for each in found:
        sizes = fit(parse(each.text), number)
        assert sizes == each.sizes
        assert sizes.dp * sizes.fsdp * sizes.tp * sizes.pp == number
        assert sizes.tp <= number // nodes
        require_fitting(each.plan, sizes, SHAPE)


def test_shards_stay_on_a_node_and_tensor_parallel_never_leaves_it() -> None:
    found = texts(4, of_node=2)

    assert "dp=2,fsdp=2" in found
    assert "tp=4" not in found
    assert "dp=2,tp=2" in found
    assert "tp=4" in texts(4)


def test_what_the_network_or_the_batch_cannot_do_is_no_candidate() -> None:
    assert not any("tp=" in text for text in texts(2, shape=replace(SHAPE, heads=3)))
    assert not any("pp=" in text for text in texts(2, shape=replace(SHAPE, layers=1)))
    # One micro-batch for two workers: they must share the model.
    shared = texts(2, shape=replace(SHAPE, global_batch=2))
    assert sorted(shared) == ["pp=2,schedule=gpipe", "tp=2"]


def test_an_option_of_ddp_narrows_the_choice() -> None:
    assert texts(4, needs_ddp=True) == ["ddp", "zero1"]


@pytest.mark.parametrize("kept", ["ddp", "fsdp2", "dp=2,tp=2", "fsdp=2,pp=2,schedule=1f1b"])
def test_a_state_stays_with_a_plan_of_its_kind(kept: str) -> None:
    workers = WorkerCount(8, 8)

    found = successors(parse(kept), candidates(workers, SHAPE), workers, SHAPE)

    assert found
    assert {each.plan.identity for each in found} == {parse(kept).identity}


def test_a_plan_that_is_no_candidate_for_these_workers_follows_their_number_or_is_refused() -> None:
    three = WorkerCount(3, 3)
    (hybrid,) = successors(parse("dp=2,fsdp=2"), candidates(three, SHAPE), three, SHAPE)
    assert (hybrid.sizes.dp, hybrid.sizes.fsdp) == (1, 3)
    # A new job fits the plan's text as if it were typed.
    assert fit(hybrid.plan, 3) == hybrid.sizes

    many = WorkerCount(9, 9)
    with pytest.raises(PlanError, match="micro-batches, too few for 9 replicas; use fewer workers"):
        successors(parse("ddp"), [], many, replace(SHAPE, global_batch=8, micro_batch=1))

    with pytest.raises(PlanError, match="a run that goes on keeps its tp and pp here; start 2 or 4 workers"):
        successors(parse("dp=2,tp=2"), candidates(three, SHAPE), three, SHAPE)
