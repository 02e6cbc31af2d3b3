"""The estimate of a plan's memory and time: it counts the network's real parameters, and orders plans as they are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elaunch.trainer.gpt.model import GPT, VOCABULARY
from elaunch.trainer.parallel.checks import Shape
from elaunch.trainer.parallel.estimate import Estimate, WorkerSpeed, estimate, parameters_of
from elaunch.trainer.parallel.plan import fit, parse
from tests.harness import REPOSITORY

SHAPE = Shape(layers=4, heads=4, width=64, context=32, global_batch=32, micro_batch=2)
SLOW_LINK = WorkerSpeed(base_bytes=1000, flops_per_s=1e12, link_bytes_per_s=1e7)


def of(text: str, workers: int = 4, shape: Shape = SHAPE, worker: WorkerSpeed = SLOW_LINK) -> Estimate:
    plan = parse(text)
    return estimate(plan, fit(plan, workers), shape, worker)


def test_the_parameters_are_those_of_the_network() -> None:
    gpt = GPT(layers=4, heads=4, width=64, context=32, dropout=0.0)
    block = sum(parameter.numel() for parameter in gpt.blocks[0].parameters())

    assert parameters_of(0, parse("ddp"), SHAPE, VOCABULARY) == (block, sum(p.numel() for p in gpt.parameters()))
    # The byte embedding is on two stages.
    first, last = (parameters_of(rank, parse("pp=2"), SHAPE, VOCABULARY)[1] for rank in range(2))
    assert first + last == sum(p.numel() for p in gpt.parameters()) + gpt.embed_byte.weight.numel()


def test_ddp_holds_16_bytes_per_parameter_and_sends_what_a_ring_sends() -> None:
    own = parameters_of(0, parse("ddp"), SHAPE, VOCABULARY)[1]
    found = of("ddp", worker=replace(SLOW_LINK, message_s=0.0))

    memory = found.memory
    assert memory.parameters + memory.gradients + memory.moments == 16 * own
    assert memory.gathered == 0
    assert found.duration.sending == pytest.approx(2 * 3 / 4 * 4 * own / 1e7)


def test_the_more_a_plan_divides_the_less_it_holds_between_steps() -> None:
    def kept(text: str) -> int:
        memory = of(text).memory
        return memory.parameters + memory.moments

    plans = ["ddp", "zero1", "hsdp", "fsdp2"]
    assert sorted(plans, key=kept, reverse=True) == plans
    assert kept("zero2") == kept("fsdp2")
    assert of("zero2").memory.gathered > of("fsdp2").memory.gathered
    assert of("fsdp=2,tp=2").memory.total < of("dp=2,tp=2").memory.total < of("ddp").memory.total


def test_1f1b_keeps_fewer_activations_than_gpipe_and_interleaved_waits_less() -> None:
    gpipe, one, interleaved = (of(f"dp=2,pp=2,schedule={name}") for name in ("gpipe", "1f1b", "interleaved"))

    assert one.memory.activations < gpipe.memory.activations
    assert gpipe.duration.waiting == one.duration.waiting == pytest.approx(one.duration.computing / 8)
    assert interleaved.duration.waiting == pytest.approx(one.duration.waiting / 2)


def test_on_a_slow_link_a_pipeline_sends_least_and_on_one_worker_nothing_is_sent() -> None:
    wide = replace(SHAPE, width=512)

    assert of("pp=4", shape=wide).duration.sending < of("ddp", shape=wide).duration.sending
    assert of("ddp", shape=wide).duration.sending < of("fsdp2", shape=wide).duration.sending
    assert of("ddp", workers=1).duration.sending == of("fsdp2", workers=1).duration.sending == 0


@pytest.mark.parametrize("text", ["ddp", "fsdp2", "hsdp", "tp=2", "pp=2", "pp=2,schedule=interleaved", "tp=2,pp=2"])
def test_a_larger_model_and_a_slower_worker_take_more(text: str) -> None:
    found, wider = of(text), of(text, shape=replace(SHAPE, width=128))
    slower = of(text, worker=replace(SLOW_LINK, flops_per_s=1e11, link_bytes_per_s=1e6, base_bytes=2000))

    assert wider.memory.total > found.memory.total
    assert wider.duration.total > found.duration.total
    assert slower.duration.total > found.duration.total
    assert slower.memory.total == found.memory.total + 1000


def test_the_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "parallelism.md").read_text()
    (program,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import fit, parse" in each]

    exec(program, {})

    assert capsys.readouterr().out.startswith("Memory(base=0, parameters=")


def test_in_bfloat16_activations_take_little_more_than_half_and_the_rest_what_it_took() -> None:
    shape = replace(SHAPE, width=256, micro_batch=8, global_batch=64)
    plan = parse("ddp")
    whole, half = (estimate(plan, fit(plan, 4), shape, SLOW_LINK, bf16=bf16).memory for bf16 in (False, True))

    # A block keeps 17 floats; the inputs of its two norms stay float32. Scores do too.
    positions = shape.micro_batch * shape.context
    kept, scores = 4 * positions * shape.width * (shape.layers + 1), 4 * 3 * positions * VOCABULARY
    assert whole.activations == 17 * kept + scores
    own = parameters_of(0, plan, shape, VOCABULARY)[1]
    assert half.activations == (2 + 15 / 2) * kept + scores + 2 * own
    assert replace(half, activations=whole.activations) == whole


def test_the_network_that_a_gpu_measured_in_bfloat16_is_estimated_within_a_tenth() -> None:
    """docs/gpu.md: 7.2 GiB were measured, of which the process had 1.3 without a network."""
    shape = Shape(layers=12, heads=12, width=768, context=1024, global_batch=12, micro_batch=12)
    plan = parse("ddp")

    memory = estimate(plan, fit(plan, 1), shape, SLOW_LINK, bf16=True).memory

    assert memory.step == pytest.approx((7.2 - 1.3) * 2**30, rel=0.1)


def test_what_was_measured_of_an_exchange_counts_where_the_link_alone_would_be_faster() -> None:
    fast = replace(SLOW_LINK, link_bytes_per_s=1e10)
    copying = replace(fast, sharded_s_per_byte=1e-8, exchange_s={"2": 0.01})

    own = parameters_of(0, parse("ddp"), SHAPE, VOCABULARY)[1]
    # 32 windows, two at a time: all four workers compute 4 micro-batches. Parameters are gathered for each pass.
    assert of("fsdp2", worker=copying).duration.sending == pytest.approx((2 * 4 + 1) * 3 / 4 * 4 * own * 1e-8)
    assert of("ddp", worker=copying) == of("ddp", worker=fast)
    divided = of("dp=2,tp=2", worker=copying).duration.sending - of("dp=2,tp=2", worker=fast).duration.sending
    # Two replicas of 8 micro-batches; 8 exchanges in each of 4 blocks.
    exchanges = 8 * 8 * 4
    activations = 2 * 32 * 64 * 4
    assert divided == pytest.approx(exchanges * (0.01 - activations / 2 / 1e10 - fast.message_s))
    assert of("tp=4", worker=copying) == of("tp=4", worker=fast)
    slower = replace(SLOW_LINK, sharded_s_per_byte=1e-12, exchange_s={"2": 1e-9})
    assert of("fsdp=2,tp=2", worker=slower) == of("fsdp=2,tp=2")


def test_what_a_stage_takes_besides_its_computation_counts_for_each_stage_and_micro_batch() -> None:
    fast = replace(SLOW_LINK, link_bytes_per_s=1e10)
    staged = replace(fast, stage_s=0.01)

    # Two replicas of 8 micro-batches. The first worker has computed all when the last one has one turn to go.
    found = {name: of(f"dp=2,pp=2,schedule={name}", worker=staged).duration for name in ("1f1b", "interleaved")}
    without = {name: of(f"dp=2,pp=2,schedule={name}", worker=fast).duration for name in ("1f1b", "interleaved")}
    activations = 2 * 32 * 64 * 4
    for name, turns, ways in (("1f1b", 8 + 1, 2), ("interleaved", 2 * 8 + 1, 4)):
        link_s = fast.sending_s(ways * 8 * activations, ways * 8)
        assert found[name].sending - without[name].sending == pytest.approx(turns * 0.01 - link_s)
    assert of("ddp", worker=staged) == of("ddp", worker=fast)
    assert of("dp=2,pp=2", worker=replace(fast, stage_s=1e-9)) == of("dp=2,pp=2", worker=fast)


def test_what_a_block_takes_in_a_stage_besides_its_computation_counts_for_each_block_and_micro_batch() -> None:
    staged = replace(SLOW_LINK, link_bytes_per_s=1e12, message_s=0.0, stage_s=0.01, stage_block_s=0.002)
    without = replace(staged, stage_s=0.0, stage_block_s=0.0)

    # Four layers, two replicas of 8 micro-batches: a stage has two blocks, an interleaved one has one.
    for name, turns, blocks in (("1f1b", 8 + 1, 2), ("interleaved", 2 * 8 + 1, 1)):
        text = f"dp=2,pp=2,schedule={name}"
        added = of(text, worker=staged).duration.sending - of(text, worker=without).duration.sending
        assert added == pytest.approx(turns * (0.01 + blocks * 0.002), rel=1e-3)


def test_a_pipeline_computes_as_long_as_its_worker_with_the_most_layers_and_the_scores() -> None:
    uneven = of("pp=2", workers=2, shape=replace(SHAPE, layers=5))

    assert uneven.duration.computing == of("ddp", workers=1, shape=replace(SHAPE, layers=3)).duration.computing


def test_norm_and_optimizer_count_for_the_parameters_that_a_worker_updates() -> None:
    worker = replace(SLOW_LINK, update_s_per_byte=1e-9)
    whole_s = 1e-9 * 4 * parameters_of(0, parse("ddp"), SHAPE, VOCABULARY)[1]
    found = {text: of(text, worker=worker).duration.updating for text in ("ddp", "zero1", "fsdp2", "hsdp", "pp=4")}

    # Without DDP all workers sum one number.
    norm_s = worker.message_s
    assert found["ddp"] == pytest.approx(whole_s)
    assert found["zero1"] == pytest.approx(whole_s / 4)
    assert found["fsdp2"] == pytest.approx(whole_s / 4 + norm_s)
    assert found["hsdp"] == pytest.approx(whole_s / 2 + norm_s)
    # Two workers have the byte embedding.
    assert whole_s / 4 < found["pp=4"] - norm_s < whole_s / 2
    assert of("fsdp2", workers=1, worker=worker).duration.updating == pytest.approx(whole_s)
