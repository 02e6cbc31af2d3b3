"""State of which each rank has a part alone: a worker killed at any moment costs no step, and the end is the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.keeper_runs import RESTORED, Calm, Forked, Run, assert_same
from tests.harness import slow
from tests.ranks import RankForker

# A kill in each generation: where, in which step, which rank, and the step that all ranks had completed then. With HSDP
# a replica may have the next one.
FEW = [("backward", 3, 0, 2), ("piece", 8, 1, 7), ("committed", 12, 0, 12)]
MANY = [
    *FEW,
    ("forward", 16, 1, 15),
    ("commit", 20, 1, 19),
    ("piece", 24, 0, 23),
    ("backward", 28, 1, 27),
    ("forward", 30, 0, 29),
]
# Error feedback is copied before the commit, so a survivor completes the step of a worker that dies in it.
FEEDBACK = [
    *(("forward", 6, 1, 5), ("backward", 10, 0, 9), ("piece", 14, 1, 13), ("optimizer", 18, 0, 18)),
    *(("commit", 22, 1, 22), ("committed", 26, 0, 26), ("forward", 31, 1, 30)),
]


@pytest.mark.parametrize(
    ("option", "workers", "kills"),
    [
        ("shards=fsdp2", 2, FEW),
        slow("shards=fsdp2", 3, MANY),
        slow("shards=zero", 2, MANY),
        slow("shards=hsdp", 4, MANY),
        slow("hook=powersgd", 2, FEEDBACK),
    ],
)
def test_a_kill_at_any_moment_costs_no_step(
    tmp_path: Path, forker: RankForker, calm: Calm, option: str, workers: int, kills: list[tuple[str, int, int, int]]
) -> None:
    asks = [f"{moment}-{generation}-{step}-{rank}" for generation, (moment, step, rank, _) in enumerate(kills)]

    options = ("lose_at_most=0", option)
    with Forked(tmp_path / "run", forker, *options, asks=asks) as run:
        ended = [run.generation(number, workers) for number in range(len(kills) + 1)]
    said = "".join(rank.err for ranks in ended for rank in ranks)

    assert [rank.code for rank in ended[-1]] == [0] * workers, said
    struck = [(r["moment"], r["step"], r["rank"]) for r in run.of("killed")]
    assert struck == [(moment, step, rank) for moment, step, rank, _ in kills]
    for generation, (_, step, _, completed) in enumerate(kills, 1):
        assert completed <= run.began(generation) <= (step if "hsdp" in option else completed)
    assert {steps for *_, steps in re.findall(RESTORED, said)} == {"0"}
    assert "random state" not in said
    # If a replica has completed a step that no rank's loop has seen complete, its loss is not recorded.
    assert run.ends == calm(workers, option).ends
    assert calm(workers, option).losses.items() >= run.losses.items()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["shards=fsdp2", "shards=zero", "hook=powersgd", "looks=1"])
def test_all_workers_killed_at_once_lose_no_step(tmp_path: Path, calm: Calm, option: str) -> None:
    asks = [f"together-0-20-{rank}" for rank in range(2)]

    with Run(tmp_path / "run", 2, "lose_at_most=0", option, asks=asks) as run:
        run.ended()

    assert run.began(1) == 19
    assert_same(run, calm(2, option))
