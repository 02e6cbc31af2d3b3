"""The plans among which auto chooses, and the formulas of their memory: they count the network's real parameters."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.parallel.estimate import Memory, candidates, memory, parameters_of, resumed
from elaunch.trainer.parallel.plan import PlanError, Shape, fit, parse, require_fitting
from tests.harness import REPOSITORY

SHAPE = Shape(layers=4, heads=4, width=64, context=32, global_batch=32, micro_batch=2)


def texts(workers: int, of_node: int | None = None, shape: Shape = SHAPE, **options: bool) -> list[str]:
    return [each.plan.text for each in candidates(workers, of_node or workers, shape, **options)]


def of(text: str, workers: int = 4, shape: Shape = SHAPE) -> Memory:
    plan = parse(text)
    return memory(plan, fit(plan, workers), shape)


def test_the_plainest_comes_first_then_those_that_divide_the_model_among_few() -> None:
    assert texts(1) == ["ddp"]
    assert texts(2)[:4] == ["ddp", "zero1", "zero2", "fsdp2"]
    assert {"tp=2", "pp=2,schedule=1f1b", "pp=2,schedule=interleaved"} <= {*texts(2)}
    four = texts(4)
    assert four.index("dp=2,tp=2") < four.index("tp=4")
    # An option of DDP.
    assert texts(4, needs_ddp=True) == ["ddp", "zero1"]


@pytest.mark.parametrize(("number", "nodes"), [(3, 1), (8, 1), (4, 2), (6, 2), (12, 3)])
def test_each_plan_uses_all_workers_once_and_passes_the_checks(number: int, nodes: int) -> None:
    found = candidates(number, number // nodes, SHAPE)

    assert len({each.plan.text for each in found}) == len(found)
    for each in found:
        sizes = fit(parse(each.plan.text), number)
        assert sizes == each.sizes
        assert sizes.dp * sizes.fsdp * sizes.tp * sizes.pp == number
        # Tensor parallel never leaves a node.
        assert sizes.tp <= number // nodes
        require_fitting(each.plan, sizes, SHAPE)


def test_what_the_network_or_the_batch_cannot_do_is_no_candidate() -> None:
    assert not any("tp=" in text for text in texts(2, shape=replace(SHAPE, heads=3)))
    assert not any("pp=" in text for text in texts(2, shape=replace(SHAPE, layers=1)))
    # One micro-batch for two workers: they must share the model.
    assert sorted(texts(2, shape=replace(SHAPE, global_batch=2))) == ["pp=2,schedule=gpipe", "tp=2"]


def test_a_plan_that_is_no_candidate_for_these_workers_follows_their_number_or_is_refused() -> None:
    assert resumed(parse("dp=2,fsdp=2"), 3, SHAPE).text == "fsdp=3"
    assert resumed(parse("zero1"), 3, SHAPE).text == "zero1"
    assert resumed(parse("pp=2,schedule=1f1b"), 4, SHAPE).text == "pp=2,schedule=1f1b"
    # Five micro-batches cannot be interleaved in rounds of one length.
    odd = replace(SHAPE, global_batch=10)
    assert resumed(parse("dp=2,pp=2,schedule=interleaved"), 2, odd).text == "pp=2,schedule=1f1b"

    with pytest.raises(PlanError, match="9 workers are more than the 8 micro-batches of a step"):
        resumed(parse("ddp"), 9, replace(SHAPE, global_batch=8, micro_batch=1))
    with pytest.raises(PlanError, match="a run that continues keeps its tp and pp here; start 2 or 4 workers"):
        resumed(parse("dp=2,tp=2"), 3, SHAPE)


def test_the_parameters_are_those_of_the_network() -> None:
    gpt = GPT(layers=4, heads=4, width=64, context=32, dropout=0.0)
    block = sum(parameter.numel() for parameter in gpt.blocks[0].parameters())

    assert parameters_of(parse("ddp"), SHAPE) == (block, 4, sum(p.numel() for p in gpt.parameters()))
    assert parameters_of(parse("pp=2"), SHAPE)[1] == 2


def test_the_more_a_plan_divides_the_less_it_holds_between_steps() -> None:
    def kept(text: str) -> int:
        return of(text).parameters + of(text).moments

    own = parameters_of(parse("ddp"), SHAPE)[2]
    assert kept("ddp") + of("ddp").gradients == 16 * own
    plans = ["ddp", "zero1", "hsdp", "fsdp2"]
    assert sorted(plans, key=kept, reverse=True) == plans
    assert kept("zero2") == kept("fsdp2")
    assert of("zero2").gathered > of("fsdp2").gathered
    assert of("fsdp=2,tp=2").step < of("dp=2,tp=2").step < of("ddp").step
    assert of("dp=2,pp=2,schedule=1f1b").activations < of("dp=2,pp=2,schedule=gpipe").activations


def test_the_network_that_a_gpu_measured_in_bfloat16_is_estimated_within_a_tenth() -> None:
    """docs/gpu.md: 7.2 GiB were measured, of which the process had 1.3 without a network."""
    shape = Shape(layers=12, heads=12, width=768, context=1024, global_batch=12, micro_batch=12)
    plan = parse("ddp")

    found = memory(plan, fit(plan, 1), shape, bf16=True)

    assert found.step == pytest.approx((7.2 - 1.3) * 2**30, rel=0.1)


def test_the_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "parallelism.md").read_text()
    (program,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "estimate import" in each]

    exec(program, {})

    assert capsys.readouterr().out.startswith("Memory(parameters=")
