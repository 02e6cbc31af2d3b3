"""Auto takes the fastest measured plan that fits, tries none that may not fit, and its table says why."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elaunch.trainer.parallel.candidates import WorkerCount, candidates
from elaunch.trainer.parallel.checks import Shape
from elaunch.trainer.parallel.choice import (
    COMPILING_ENOUGH_S,
    MEASURED,
    NothingFits,
    PlanOption,
    PlanRoom,
    PlanTrial,
    StepMemory,
    choose,
    choose_by_estimate,
    fits_as_measured,
    rows,
    table,
    to_measure,
)
from elaunch.trainer.parallel.estimate import KeptCopies, WorkerSpeed, estimate

SHAPE = Shape(layers=4, heads=4, width=256, context=32, global_batch=32, micro_batch=2)
WORKER = WorkerSpeed(base_bytes=100 << 20, flops_per_s=1e10, link_bytes_per_s=1e9)
AMPLE = PlanRoom(1 << 40, "the machine")
MB = 1 << 20


def options(
    workers: int = 4,
    *,
    copies: KeptCopies = KeptCopies(),  # noqa: B008
    known: StepMemory | None = None,
) -> list[PlanOption]:
    return [
        PlanOption(each, estimate(each.plan, each.sizes, SHAPE, WORKER, copies=copies), known)
        for each in candidates(WorkerCount(workers, workers), SHAPE)
    ]


def as_estimated(option: PlanOption) -> PlanTrial:
    return PlanTrial(option.estimate.memory.step, option.estimate.duration.total)


def test_the_plainest_plan_and_those_estimated_fastest_are_measured_and_the_fastest_is_taken() -> None:
    tried: list[str] = []

    def measure(option: PlanOption) -> PlanTrial:
        tried.append(option.text)
        return PlanTrial(option.estimate.memory.step, 3.0 - len(tried))

    choice = choose(options(), AMPLE, measure)

    assert len(tried) == len(set(tried)) == MEASURED
    assert choice.option.text == tried[-1]
    estimated = sorted(options(), key=lambda each: each.estimate.duration.total)
    assert tried[0] == "ddp"
    assert estimated[0].text in tried


def test_after_much_compiling_no_further_plan_is_measured_and_the_table_says_so() -> None:
    def measure(option: PlanOption) -> PlanTrial:
        return replace(as_estimated(option), compiling_s=0.6 * COMPILING_ENOUGH_S)

    choice = choose(options(), AMPLE, measure)

    assert len(choice.trials) == 2
    assert table(choice, options(), AMPLE)[-1] == (
        "the plans were compiled, which took 72 s beside their steps; so no further plan was measured"
    )


def test_plans_are_compiled_until_one_fits_whatever_that_takes() -> None:
    def measure(option: PlanOption) -> PlanTrial:
        taken = AMPLE.bytes if option.candidate.plan.has_ddp else option.estimate.memory.step
        return PlanTrial(taken, 1.0, compiling_s=COMPILING_ENOUGH_S)

    choice = choose(options(), AMPLE, measure)

    *too_large, last = choice.trials
    assert too_large
    assert choice.option.text == last


def test_plans_that_differ_in_the_schedule_alone_are_measured_once() -> None:
    forms = [each.candidate.plan.form for each in to_measure(options(), AMPLE)]

    assert len(forms) == len(set(forms))


def test_of_plans_that_are_as_fast_the_plainest_is_taken() -> None:
    choice = choose(options(), AMPLE, lambda option: PlanTrial(option.estimate.memory.step, 1.0))

    assert choice.option.text == next(each.text for each in options() if each.text in choice.trials)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_measured_no_plan_is_tried_or_taken_that_needs_too_much(seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.choice([1, 2, 3, 4, 6, 8])
    every = options(workers, copies=KeptCopies(workers, of_replicated=2, of_parts=2))
    room = PlanRoom(draw.randint(100 << 20, 260 << 20), "the cgroup")
    tried: dict[str, PlanTrial] = {}

    def measure(option: PlanOption) -> PlanTrial:
        assert option.text not in tried
        assert option.needs <= room.bytes
        memory = int(option.estimate.memory.step * draw.uniform(0.7, 1.6))
        tried[option.text] = PlanTrial(
            memory, option.estimate.duration.total * draw.uniform(0.5, 5), draw.randint(0, 5 << 20)
        )
        return tried[option.text]

    try:
        choice = choose(every, room, measure)
    except NothingFits:
        assert not any(fits_as_measured(each, tried[each.text], room) for each in every if each.text in tried)
        # It does not give up before all that might fit was tried.
        assert len(tried) == len(to_measure(every, room))
        return

    taken = tried[choice.option.text]
    assert fits_as_measured(choice.option, taken, room)
    fitting = [
        tried[each.text].step_s
        for each in every
        if each.text in tried and fits_as_measured(each, tried[each.text], room)
    ]
    assert taken.step_s <= 1.03 * min(fitting)
    assert len(tried) >= min(MEASURED, len(to_measure(every, room)))


def test_the_less_memory_there_is_the_less_the_chosen_plan_needs() -> None:
    needs = []
    for megabytes in range(400, 100, -10):
        try:
            option = choose(options(), PlanRoom(megabytes << 20, "the cgroup"), as_estimated).option
        except NothingFits:
            break
        assert option.needs <= megabytes << 20
        needs.append(option.needs)

    assert needs[-1] < needs[0]
    assert len(needs) < 30


def test_a_refusal_has_the_values_and_the_way_out() -> None:
    room = PlanRoom(110 << 20, "the cgroup /a (memory.max 440.0 MB), for 4 workers")

    with pytest.raises(NothingFits) as caught:
        choose(options(copies=KeptCopies(4, of_replicated=2, of_parts=2)), room, as_estimated)

    said = str(caught.value)
    least = min(options(copies=KeptCopies(4, of_replicated=2, of_parts=2)), key=lambda each: each.needs)
    assert said.startswith(
        f"--parallel auto: no plan fits. The smallest is {least.text}: it needs {least.needs / (1 << 30):.2f} GiB"
    )
    assert "0.10 GiB the process itself" in said
    assert "may take 0.11 GiB: the cgroup /a (memory.max 440.0 MB), for 4 workers; give the job more memory" in said
    assert "\n" not in said


def test_without_a_measurement_the_fastest_estimate_counts_and_what_was_measured_corrects_the_memory() -> None:
    (ddp,) = [each for each in options() if each.text == "ddp"]
    memory = ddp.estimate.memory
    taken = memory.step + (40 << 20)
    ddp = replace(ddp, known=StepMemory(memory.step, taken))

    # It ran with just that.
    assert ddp.needs == memory.base + taken
    assert choose_by_estimate(options(), AMPLE).text == to_measure(options(), AMPLE)[0].text
    with pytest.raises(NothingFits):
        choose_by_estimate([ddp], PlanRoom(ddp.needs - 1, "the machine"))
    assert choose_by_estimate([ddp], PlanRoom(ddp.needs, "the machine")) is ddp


@pytest.mark.parametrize(
    ("known", "estimated", "expected"),
    [
        # A compiler's own memory beside a small network does not grow with the network's part.
        (StepMemory(2 * MB, 50 * MB), 4 * MB, (4 + 48) * MB + MB // 2),
        (StepMemory(100 * MB, 110 * MB), 100 * MB, 110 * MB),
        (StepMemory(100 * MB, 110 * MB), 60 * MB, 70 * MB),
        # An estimate that was too high is not taken for a reserve.
        (StepMemory(100 * MB, 80 * MB), 100 * MB, 100 * MB),
        (StepMemory(100 * MB, 80 * MB), 180 * MB, 200 * MB),
    ],
)
def test_what_the_estimate_lacked_is_added_and_only_its_growth_may_be_too_low(
    known: StepMemory, estimated: int, expected: int
) -> None:
    assert known.corrected(estimated) == expected


@pytest.mark.parametrize("growth", [1.0, 1.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("error", [-0.3, 0.0, 0.1, 0.25])
def test_an_estimate_that_is_too_low_by_up_to_the_margin_never_promises_too_little(error: float, growth: float) -> None:
    taken = int(100 * MB * (1 + error))

    assert StepMemory(100 * MB, taken).corrected(int(100 * MB * growth)) >= int(taken * growth) - 1


def test_the_table_has_the_chosen_plan_first_then_the_measured_ones_and_those_that_are_too_large() -> None:
    room = PlanRoom(sorted(each.needs for each in options())[4], "the cgroup")
    choice = choose(options(), room, as_estimated)

    head, first, *others, last = table(choice, options(), room)

    assert head.split() == ["plan", "memory:", "estimate", "measured", "step:", "estimate", "measured"]
    assert first.startswith(choice.option.text)
    assert first.endswith("chosen")
    assert sum("times as long" in line or "less plain" in line for line in others) == len(choice.trials) - 1
    too_large = [line for line in others if f" of {room.bytes / (1 << 30):.2f}" in line]
    assert 0 < len(too_large) <= 3
    assert all(
        f"needs {each.needs / (1 << 30):.2f} GiB" in line
        for line in too_large
        for each in options()
        if line.startswith(f"{each.text} ")
    )
    assert last.endswith("not measured")
    assert len(rows(choice, options())) == len(options())
