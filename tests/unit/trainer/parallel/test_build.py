"""Auto takes the fastest measured plan that fits and tries none that may not fit; its record is sound or is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from elaunch.trainer.gpt.config import RunDirectory
from elaunch.trainer.parallel.build import (
    TRIALS_MAX,
    KeptPlan,
    NothingFits,
    PlanTrial,
    WorkerCapacity,
    choose,
)
from elaunch.trainer.parallel.estimate import Candidate, candidates
from elaunch.trainer.parallel.plan import Shape, parse

SHAPE = Shape(layers=4, heads=4, width=256, context=32, global_batch=32, micro_batch=2)
TAKEN = 100 << 20
AMPLE = WorkerCapacity(1 << 40, TAKEN, "the machine")


def options(workers: int = 4) -> list[Candidate]:
    return candidates(workers, workers, SHAPE)


def test_the_plainest_are_measured_and_the_fastest_of_them_is_taken() -> None:
    tried: list[str] = []

    def measure(option: Candidate) -> PlanTrial:
        tried.append(option.plan.text)
        return PlanTrial(option.memory.step, 9.0 - len(tried))

    option, _ = choose(options(), AMPLE, measure)

    assert len(tried) == TRIALS_MAX
    assert tried[:4] == ["ddp", "zero1", "zero2", "fsdp2"]
    assert option.plan.text == tried[-1]


def test_the_plainest_of_equals_is_taken_and_no_further_one_is_measured_when_the_time_is_over() -> None:
    option, tried = choose(options(), AMPLE, lambda each: PlanTrial(1, 1.0), is_over=lambda: True)

    assert (option.plan.text, tried) == ("ddp", 1)
    option, _ = choose(options(), AMPLE, lambda each: PlanTrial(1, 1.0 if each.plan.text == "ddp" else 0.98))
    assert option.plan.text == "ddp"


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_measured_no_plan_is_tried_or_taken_that_needs_too_much(seed: int) -> None:
    draw = random.Random(seed)
    every = options(draw.choice([1, 2, 3, 4, 6, 8]))
    capacity = WorkerCapacity(draw.randint(TAKEN, 260 << 20), TAKEN, "the cgroup")
    tried: dict[str, PlanTrial] = {}

    def measure(option: Candidate) -> PlanTrial:
        assert option.plan.text not in tried
        assert capacity.needed(option) <= capacity.limit
        trial = PlanTrial(int(option.memory.step * draw.uniform(0.7, 1.6)), draw.uniform(0.5, 5))
        tried[option.plan.text] = trial
        return trial

    def fitting() -> list[Candidate]:
        measured = [each for each in every if each.plan.text in tried]
        return [each for each in measured if capacity.needed(each, tried[each.plan.text].memory) <= capacity.limit]

    try:
        option, _ = choose(every, capacity, measure)
    except NothingFits:
        # It does not give up before all that might fit was tried.
        assert not fitting()
        assert {parse(text).form for text in tried} == {
            e.plan.form for e in every if capacity.needed(e) <= capacity.limit
        }
        return

    assert option in fitting()
    assert tried[option.plan.text].step_s <= 1.03 * min(tried[each.plan.text].step_s for each in fitting())


def test_a_refusal_has_the_values_and_the_way_out() -> None:
    capacity = WorkerCapacity(110 << 20, TAKEN, "the cgroup /a (memory.max 440.0 MB), for 4 workers")
    least = min(options(), key=capacity.needed)

    with pytest.raises(NothingFits) as caught:
        choose(options(), capacity, lambda each: PlanTrial(1, 1.0))

    sentence = str(caught.value)
    assert f"The smallest is {least.plan.text}: it needs {capacity.needed(least) / (1 << 30):.2f} GiB" in sentence
    assert "0.10 GiB the process itself" in sentence
    assert "may take 0.11 GiB: the cgroup /a (memory.max 440.0 MB), for 4 workers; give the job more" in sentence
    assert "\n" not in sentence


RECORD = KeptPlan("dp=2,tp=2", 4)


@pytest.mark.parametrize(
    "content",
    [
        b'{"plan": "auto", "world_size": 4}',
        b'{"plan": "no plan", "world_size": 4}',
        b'{"plan": "ddp", "world_size": 0}',
        b'{"plan": "ddp", "world_size": "4"}',
        b'{"plan": "ddp", "world_size": 4, "other": 1}',
        b"{",
    ],
)
def test_a_record_is_read_as_it_was_written_or_refused(content: bytes) -> None:
    assert KeptPlan.read(RECORD.content) == RECORD

    with pytest.raises(ValueError):  # noqa: PT011
        KeptPlan.read(content)


def test_the_choice_is_kept_beside_checkpoints_that_are_elsewhere_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    elsewhere = str(tmp_path / "checkpoints")
    first, second = RunDirectory(tmp_path / "a", elsewhere), RunDirectory(tmp_path / "b", elsewhere)
    assert first.kept_plan() is None

    first.keep_plan(RECORD.content)

    # Another run directory goes on from the same checkpoints.
    assert first.kept_plan() == second.kept_plan() == RECORD.content
    assert not second.plan.exists()
    assert not first.has_checkpoints()
