"""The bundled trainer with each plan computes what one process does, also if workers die and their number changes."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest

from tests.faults.trainings import GENTLE, CalmTrainings, Forked, Trained
from tests.harness import slow
from tests.ranks import RankForker

STEPS, LOSE_AT_MOST = 20, 5
# The kills come between two snapshots, and all ranks have the one before (docs/keeper.md, "What a failure costs").
LOST_MAX = LOSE_AT_MOST - 1
# Four layers for pipelines. Workers that share one model draw masks of their own: no dropout.
SHAPE = (*GENTLE, "--steps", str(STEPS), "--micro-batch", "3", "--layers", "4", "--dropout", "0")
KEPT = ("--lose-at-most", str(LOSE_AT_MOST), "--eval-every", "11")
# Relative, over 20 steps.
TOLERANCE = 1e-5
PLANS = ["ddp", "zero1", "zero2", "fsdp2", "hsdp", "tp=2", "fsdp=2,tp=2", "pp=2", "fsdp=2,pp=2", "tp=2,pp=2"]
PLANS += ["pp=2,schedule=gpipe", "pp=2,schedule=interleaved"]


def assert_trained(run: Trained, calm: Trained, lost: int) -> None:
    """The run is complete, and its losses are those of the undisturbed DDP run."""
    run.assert_complete(lost=lost, steps=STEPS)
    worst = run.difference(calm)
    print(f"largest relative difference of a loss: {worst:.2g}")
    assert worst <= TOLERANCE
    assert run.result["held_out_loss"] == pytest.approx(calm.result["held_out_loss"], rel=TOLERANCE)
    norms = {line["step"]: line["grad_norm"] for line in calm.lines}
    assert all(line["grad_norm"] == pytest.approx(norms[line["step"]], rel=1e-4) for line in run.lines)
    assert [line["step"] for line in run.lines if "held_out_loss" in line] == [1, 12]


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (4, "dp=2,tp=2"),
        (4, "dp=2,pp=2"),
        slow(4, "tp=4"),
        slow(4, "tp=2,pp=2,schedule=interleaved"),
        slow(4, "pp=4"),
        # Of 4 micro-batches; of three replicas one computes one that does not count.
        *(slow(3, plan) for plan in ("zero2", "fsdp2", "dp=3")),
        slow(6, "dp=3,pp=2"),
        slow(8, "dp=2,tp=2,pp=2"),
        slow(8, "fsdp=2,tp=2,pp=2"),
        slow(8, "dp=2,fsdp=2,tp=2"),
        slow(8, "dp=2,pp=4,schedule=gpipe"),
    ],
)
def test_a_plan_trains_as_one_process(
    tmp_path: Path, forker: RankForker, calm_training: CalmTrainings, workers: int, plan: str
) -> None:
    words = (*SHAPE, "--heads", "4", "--micro-batch", "1" if workers > 4 else "3", "--eval-every", "11")
    calm = calm_training(1, *words, steps=STEPS)
    # An untrained network guesses one byte of 256.
    assert calm.losses[1] == pytest.approx(math.log(256), rel=0.05)

    with Forked(tmp_path / "run", forker) as run:
        assert [rank.code for rank in run.generation(0, workers, *words, "--parallel", plan)] == [0] * workers
        assert_trained(run, calm, lost=0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_job_of_4_workers_goes_on_with_2_and_then_with_4(
    tmp_path: Path, forker: RankForker, calm_training: CalmTrainings, plan: str
) -> None:
    if plan == "tp=2,pp=2":
        pytest.skip("one model takes 4 workers: test_plan.py has the refusal")
    words = (*SHAPE, *KEPT, "--parallel", plan)
    calm = calm_training(2, *SHAPE, steps=STEPS)

    with Forked(tmp_path / "run", forker, asks=["loss-0-9-3", "loss-1-15-0"]) as run:
        assert run.generation(0, 4, *words)[3].code == -signal.SIGKILL
        assert run.generation(1, 2, *words)[0].code == -signal.SIGKILL
        assert [rank.code for rank in run.generation(2, 4, *words)] == [0] * 4

        assert run.struck() == ["loss-0-9-3", "loss-1-15-0"]
        lost = [8 - run.began(1), 14 - run.began(2)]
        assert all(0 <= each <= LOST_MAX for each in lost)
        assert_trained(run, calm, sum(lost))
        assert [line["world_size"] for line in run.lines if line["step"] in (1, run.began(2), STEPS)] == [4, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,tp=2", "fsdp=2,pp=2"])
def test_a_run_with_a_failure_is_to_the_bit_the_run_without_it(
    tmp_path: Path, forker: RankForker, calm_training: CalmTrainings, plan: str
) -> None:
    # Each worker draws masks of its own: at a restart the same ones.
    words = (*SHAPE, "--dropout", "0.1", "--parallel", plan)
    calm = calm_training(4, *words, steps=STEPS)

    with Forked(tmp_path / "run", forker, asks=["loss-0-9-2"]) as run:
        assert run.generation(0, 4, *words)[2].code == -signal.SIGKILL
        assert [rank.code for rank in run.generation(1, 4, *words)] == [0] * 4

        assert run.struck() == ["loss-0-9-2"]
        run.assert_same(calm)


AUTO = ("--parallel", "auto", "--lose-at-most", "0")
# An option of DDP leaves plans whose state goes to any number of workers.
ANY_NUMBER = (*AUTO, "--bucket-mb", "1")


def plan_of(run: Forked) -> str:
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
    logged = "".join(rank.err for ranks in ended for rank in ranks)
    assert run.struck() == DEATHS
    plan = plan_of(run)
    # Generation 1 measures, since nothing was chosen; generation 2 has a state, and its plan.
    assert len(re.findall(r"parallel: \S+ is chosen", logged, re.MULTILINE)) == 1
    assert logged.count(f"parallel: {plan}, as this run has chosen") == 1
    assert logged.count(f" workers with {plan}") == 2
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
    logged = ended[0].err.splitlines()[-1]
    assert re.search(
        r"no plan fits. The smallest is \S+: it needs \d+\.\d\d GiB .*, and a worker may take \d+\.\d\d GiB: the ",
        logged,
    )
    assert logged.endswith("a smaller --micro-batch or a smaller network")
    assert not any(rank.err for rank in ended[1:])
