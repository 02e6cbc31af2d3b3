"""Whatever dies at whatever moment: no step is lost while a worker lives, the result is that of the unfailed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.keeper_runs import RESTORED, Calm, Forked, Run, assert_same
from tests.harness import slow
from tests.ranks import RankForker
from tests.warm import SharedStart


def kills(run: Run) -> list[tuple[int, str, int, int]]:
    return [(r["generation"], r["moment"], r["step"], r["rank"]) for r in run.of("killed")]


# The kills in each generation of one job of three workers: a moment, a step and a rank.
MOMENTS = [
    ("forward", 1, 2),
    ("backward", 4, 0),
    ("optimizer", 7, 2),
    ("commit", 8, 0),
    ("committed", 10, 2),
    ("restore", 0, 0),
    # Twice in a row, and before it has computed anything.
    ("restore", 0, 2),
    ("start", 0, 0),
    ("copy", 14, 0),
    ("crash", 16, 0),
]
TWO_SURVIVORS, ONE_SURVIVOR, FROZEN, ALL, CORRUPT, LAST_0 = range(len(MOMENTS), len(MOMENTS) + 6)
# A generation takes its first snapshot 4 steps after the step that it has restored.
STORM = [
    *(f"{moment}-{generation}-{step}-{rank}" for generation, (moment, step, rank) in enumerate(MOMENTS)),
    # Rank 2 dies. Ranks 0 and 1 die while they save the step before.
    *(f"{place}-{TWO_SURVIVORS}-{rest}" for place, rest in (("forward", "21-2"), ("copy", "20-0"), ("copy", "20-1"))),
    *(f"forward-{ONE_SURVIVOR}-22-2", f"copy-{ONE_SURVIVOR}-21-0"),
    # The frozen rank holds the lock until it is killed.
    f"freeze-{FROZEN}-25-0",
    *(f"together-{ALL}-32-{rank}" for rank in range(3)),
    *(f"corrupt-{CORRUPT}-35-0", *(f"together-{CORRUPT}-35-{rank}" for rank in range(3))),
    *(f"together-{LAST_0}-32-{rank}" for rank in (1, 2)),
]


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory, keeper_start: SharedStart) -> Run:
    """The job of STORM after its end, with whatever exit code."""
    folder = tmp_path_factory.mktemp("storm") / "run"
    with Run(folder, 3, "lose_at_most=4", asks=STORM, launch=["--hang-timeout", "8"], shared=keeper_start) as run:
        run.job.wait(500)
    return run


def struck(run: Run, generation: int) -> set[tuple[str, int, int]]:
    return {(moment, step, rank) for g, moment, step, rank in kills(run) if g == generation}


def restored(run: Run, after: int) -> tuple[int, int]:
    """The step that was restored after that generation, and the number of repeated steps."""
    later = min((r["generation"] for r in run.of("began") if r["generation"] > after), default=-1)
    found = {(r["step"], r["repeated"]) for r in run.of("began", generation=later)}
    assert len(found) == 1, run.job.output
    return found.pop()


@pytest.mark.parametrize("generation", range(len(MOMENTS)), ids=["-".join(map(str, each)) for each in MOMENTS])
def test_a_kill_at_any_moment_loses_no_step(storm: Run, generation: int) -> None:
    moment, *_ = MOMENTS[generation]

    if moment == "crash":
        assert f"ValueError: asked for by the test, in generation {generation}" in storm.job.output
    else:
        assert struck(storm, generation) == {MOMENTS[generation]}
    step, repeated = restored(storm, generation)
    assert repeated == 0
    # This holds only for a generation that had begun to train.
    if storm.of("began", generation=generation):
        assert step >= storm.newest_done(generation)


def test_survivors_killed_while_they_save_leave_the_snapshot_before(storm: Run) -> None:
    assert {moment for moment, _, _ in struck(storm, TWO_SURVIVORS)} == {"forward", "copy"}
    assert restored(storm, TWO_SURVIVORS) == (19, 1)
    logged = f"restored step 19 from memory (of generation {TWO_SURVIVORS}); 1 step is repeated"
    assert logged in storm.job.output


def test_a_worker_frozen_in_the_middle_of_a_copy_costs_no_step(storm: Run) -> None:
    assert [(r["generation"], r["rank"]) for r in storm.of("frozen")] == [(FROZEN, 0)]
    assert restored(storm, FROZEN) == (25, 0)
    assert f"restored step 25 from memory (of generation {FROZEN}); 0 steps are repeated" in storm.job.output


def test_all_workers_killed_at_once_repeat_the_steps_since_the_snapshot_and_log_it(storm: Run) -> None:
    assert struck(storm, ALL) == {("together", 32, rank) for rank in range(3)}
    # The newest snapshot is that after step 29. The next one would have been after step 33.
    assert restored(storm, ALL) == (29, 2)
    assert storm.job.output.count(f"restored step 29 from memory (of generation {ALL}); 2 steps are repeated") == 1


def test_a_corrupt_copy_is_skipped_and_logged(storm: Run) -> None:
    assert struck(storm, CORRUPT) == {("together", 35, rank) for rank in range(3)}
    (corrupted,) = storm.of("corrupted", generation=CORRUPT)
    assert corrupted["copies"] == [29, 33]
    assert f"skipping the copy of step 33 in {corrupted['path']}: its checksum is wrong" in storm.job.output
    assert restored(storm, CORRUPT) == (29, 5)
    assert "5 steps are repeated" in storm.job.output


def test_after_all_of_these_the_end_is_that_of_the_unfailed_run(storm: Run, calm: Calm) -> None:
    assert storm.job.code == 0, storm.job.output
    assert max(r["generation"] for r in storm.of("began")) == LAST_0 + 1
    assert_same(storm, calm(3))


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
    logged = "".join(rank.err for ranks in ended for rank in ranks)

    assert [rank.code for rank in ended[-1]] == [0] * workers, logged
    struck = [(r["moment"], r["step"], r["rank"]) for r in run.of("killed")]
    assert struck == [(moment, step, rank) for moment, step, rank, _ in kills]
    for generation, (_, step, _, completed) in enumerate(kills, 1):
        assert completed <= run.began(generation) <= (step if "hsdp" in option else completed)
    assert {steps for *_, steps in re.findall(RESTORED, logged)} == {"0"}
    assert "random state" not in logged
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
