"""Each plan computes what one process computes: losses, norms, the held-out loss and the final weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import slow
from tests.ranks import RankForker, Ranks

PROGRAM = Path(__file__).with_name("divided_ranks.py")
# Eight ranks take a while on a busy machine, and a C++ compiler too.
DEADLINE_S, COMPILED_S = 240.0, 900.0
# Relative; docs/parallelism.md has what was measured. Weights are compared by the norm of their difference: biases of
# keys have gradients of rounding alone, of which AdamW makes steps as long as of others.
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 2e-6, 1e-5, 1e-3


@pytest.mark.parametrize(
    ("workers", "plans"),
    [
        (4, ["dp=2,tp=2", "dp=2,pp=2"]),
        slow(4, ["ddp", "zero1", "zero2", "fsdp2", "hsdp"]),
        slow(4, ["tp=4", "fsdp=2,tp=2", "tp=2,pp=2", "tp=2,pp=2,schedule=interleaved"]),
        slow(4, ["pp=4", "fsdp=2,pp=2", "dp=2,pp=2,schedule=gpipe", "dp=2,pp=2,schedule=interleaved"]),
        # 8 micro-batches: of three replicas one computes one that does not count.
        slow(3, ["zero2", "fsdp2", "dp=3"]),
        slow(6, ["dp=3,pp=2", "dp=3,tp=2"]),
        slow(8, ["dp=2,tp=2,pp=2", "fsdp=2,tp=2,pp=2", "dp=2,fsdp=2,tp=2"]),
        slow(8, ["dp=2,fsdp=2,pp=2", "dp=2,pp=4,schedule=gpipe"]),
    ],
)  # fmt: skip
def test_a_plan_has_the_losses_and_the_weights_of_one_process(
    forker: RankForker, workers: int, plans: list[str]
) -> None:
    # A layer for each stage is enough; four stages and interleaved ones need four.
    layers = "2" if plans[0] == "dp=2,tp=2" else "4"

    with Ranks(forker, workers, PROGRAM, "3", layers, *plans) as ranks:
        check(ranks.answers(DEADLINE_S), plans)


def check(answers: list[Any], plans: list[str]) -> None:
    print(answers[0])
    for answer in answers:
        assert list(answer) == plans
        for plan, apart in answer.items():
            assert apart["losses"] < LOSS_TOLERANCE, (plan, apart)
            assert apart["held_out"] < LOSS_TOLERANCE, (plan, apart)
            assert apart["norms"] < NORM_TOLERANCE, (plan, apart)
            assert apart["weights"] < WEIGHT_TOLERANCE, (plan, apart)
