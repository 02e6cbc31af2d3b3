"""`--parallel auto`: workers die while plans are measured and afterwards, and the run keeps the plan of its state."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.faults.trainings import GENTLE, CalmTrainings, Forked, OneNode, Trained
from tests.ranks import RankForker

STEPS = 20
SHAPE = (*GENTLE, "--steps", str(STEPS), "--micro-batch", "3", "--layers", "4", "--dropout", "0")
AUTO = ("--parallel", "auto", "--lose-at-most", "0")
# An option of DDP leaves plans whose state goes to any number of workers.
ANY_NUMBER = (*AUTO, "--bucket-mb", "1")
TOLERANCE = 1e-5


def plan_of(run: Forked | OneNode) -> str:
    found: str = json.loads((run.out / "plan.json").read_text())["plan"]
    return found


DEATHS = ["measuring-0-0-1", "loss-1-9-0"]


@pytest.mark.slow
def test_a_worker_that_dies_while_plans_are_measured_and_one_that_dies_in_a_step_cost_no_step(
    tmp_path: Path, forker: RankForker, calm_training: CalmTrainings
) -> None:
    calm = calm_training(2, *SHAPE, steps=STEPS)

    with Forked(tmp_path / "run", forker, asks=DEATHS) as run:
        ended = [run.generation(number, 2, *SHAPE, *ANY_NUMBER) for number in range(3)]

    assert [rank.code for rank in ended[2]] == [0, 0], ended[2][0].err
    assert_goes_on_with_its_plan(run, calm, "".join(rank.err for ranks in ended for rank in ranks))


def assert_goes_on_with_its_plan(run: Forked | OneNode, calm: Trained, said: str) -> None:
    assert run.struck() == DEATHS
    plan = plan_of(run)
    # Generation 1 measures, since nothing was chosen; generation 2 has a state, and its plan.
    assert len(re.findall(r"parallel: \S+ is chosen", said, re.MULTILINE)) == 1
    assert said.count(f"parallel: {plan}, as this run has chosen") == 1
    assert said.count(f" workers with {plan}") == 2
    assert run.began(2) == 8
    run.assert_complete(steps=STEPS)
    assert run.difference(calm) <= TOLERANCE


@pytest.mark.slow
def test_a_restart_with_other_workers_takes_a_plan_that_can_go_on_with_the_state(
    tmp_path: Path, forker: RankForker, calm_training: CalmTrainings
) -> None:
    calm = calm_training(2, *SHAPE, steps=STEPS)

    with Forked(tmp_path / "run", forker, asks=["loss-0-9-3"]) as run:
        assert run.generation(0, 4, *SHAPE, *ANY_NUMBER)[3].code == -signal.SIGKILL
        plan = plan_of(run)
        first, second = run.generation(1, 2, *SHAPE, *ANY_NUMBER)

        assert (first.code, second.code) == (0, 0), first.err
        assert plan in ("ddp", "zero1")
        assert f"parallel: {plan}, as this run has chosen with 4 workers; for 2: {plan}" in first.err
        assert run.began(1) == 8
        run.assert_complete(steps=STEPS)
        assert run.difference(calm) <= TOLERANCE


def test_a_network_for_which_no_plan_has_memory_is_refused_with_the_values_by_rank_0_alone(
    tmp_path: Path, forker: RankForker
) -> None:
    # 16 TB of parameters: nothing of that size is made.
    huge = ("--layers", "5000000", "--width", "256", "--heads", "4")

    with Forked(tmp_path / "run", forker) as run:
        ended = run.generation(0, 2, *SHAPE, *AUTO, *huge)

    assert [rank.code for rank in ended] == [2, 2]
    said = ended[0].err.splitlines()[-1]
    assert re.search(
        r"no plan fits. The smallest is \S+: it needs \d+\.\d\d GiB .*, and a worker may take \d+\.\d\d GiB: the ", said
    )
    assert said.endswith("a smaller --micro-batch or a smaller network")
    assert not any(rank.err for rank in ended[1:])
