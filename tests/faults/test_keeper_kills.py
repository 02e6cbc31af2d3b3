"""Whatever dies at whatever moment: no step is lost while a worker lives, and the end is that of the unfailed run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.keeper_runs import RESTORED, Calm, Run, assert_same
from tests.harness import slow, wait_for


def kills(run: Run) -> list[tuple[int, str, int, int]]:
    return [(r["generation"], r["moment"], r["step"], r["rank"]) for r in run.of("killed")]


@pytest.mark.parametrize("workers", [slow(2), 3, slow(4)])
def test_a_kill_at_any_moment_loses_no_step_and_changes_no_bit(tmp_path: Path, calm: Calm, workers: int) -> None:
    last = workers - 1
    plan: Sequence[tuple[str, int, int]] = [
        ("forward", 1, last),
        ("forward", 3, 0),
        ("backward", 5, 0),
        ("backward", 6, last),
        ("optimizer", 8, 0),
        ("optimizer", 9, last),
        ("commit", 11, 0),
        ("committed", 13, last),
        ("restore", 0, 0),
        # Twice in a row, and before it has computed anything.
        ("restore", 0, last),
        ("start", 0, 0),
        ("copy", 16, 0),
        ("crash", 20, 0),
        ("forward", 30, 0),
    ]
    # A snapshot after each step, so that there is one after step 16 too.
    asks = [f"{moment}-{generation}-{step}-{rank}" for generation, (moment, step, rank) in enumerate(plan)]

    with Run(tmp_path / "stormy", workers, "snapshot_every=1", asks=asks) as stormy:
        stormy.ended()

    # Each of them really struck.
    struck = {(generation, moment, rank) for generation, moment, _, rank in kills(stormy)}
    assert struck == {(g, moment, rank) for g, (moment, _, rank) in enumerate(plan) if moment != "crash"}
    assert "ValueError: asked for by the test, in generation 12" in stormy.job.output
    assert {steps for *_, steps in re.findall(RESTORED, stormy.job.output)} == {"0"}
    for generation in range(1, len(plan) + 1):
        if stormy.of("began", generation=generation) and stormy.of("began", generation=generation - 1):
            assert stormy.began(generation) >= stormy.newest_done(generation - 1)
    assert_same(stormy, calm(workers))


@pytest.mark.parametrize("workers", [2, slow(4)])
def test_all_but_one_are_killed_and_the_last_one_saves(tmp_path: Path, calm: Calm, workers: int) -> None:
    asks = [f"together-0-7-{rank}" for rank in range(1, workers)]
    asks += [f"together-1-12-{rank}" for rank in range(workers - 1)]

    with Run(tmp_path / "stormy", workers, "snapshot_every=100", asks=asks) as stormy:
        stormy.ended()

    assert len(kills(stormy)) == 2 * (workers - 1)
    assert (stormy.began(1), stormy.began(2)) == (6, 11)
    assert [steps for *_, steps in re.findall(RESTORED, stormy.job.output)] == ["0", "0"]
    assert_same(stormy, calm(workers))


def test_all_workers_killed_at_once_repeat_the_steps_since_the_snapshot_and_it_is_said(
    tmp_path: Path, calm: Calm
) -> None:
    asks = [f"together-{generation}-{step}-{rank}" for generation, step in ((0, 20), (1, 20)) for rank in range(3)]

    with Run(tmp_path / "stormy", 3, "snapshot_every=8", asks=asks) as stormy:
        stormy.ended()

    assert len(kills(stormy)) == 6
    # Snapshots after step 1, 9 and 17.
    assert [stormy.began(1), stormy.began(2)] == [17, 17]
    assert "restored step 17 from memory (of generation 0); 2 steps are repeated" in stormy.job.output
    assert_same(stormy, calm(3))


def test_survivors_killed_while_they_save_leave_the_snapshot_before(tmp_path: Path, calm: Calm) -> None:
    # Rank 2 dies in step 15; 0 and 1 both die in the middle of saving step 14.
    with Run(
        tmp_path / "stormy", 3, "snapshot_every=6", asks=["forward-0-15-2", "copy-0-14-0", "copy-0-14-1"]
    ) as stormy:
        stormy.ended()

    assert {moment for _, moment, _, _ in kills(stormy)} == {"forward", "copy"}
    assert stormy.began(1) == 13
    assert "1 step is repeated" in stormy.job.output
    assert_same(stormy, calm(3))


def test_a_survivor_killed_while_it_saves_is_made_up_for_by_another(tmp_path: Path, calm: Calm) -> None:
    with Run(tmp_path / "stormy", 3, "snapshot_every=6", asks=["forward-0-15-2", "copy-0-14-0"]) as stormy:
        stormy.ended()

    # Rank 1 saved it before, or after it was dead.
    assert stormy.began(1) == 14
    assert_same(stormy, calm(3))


def test_a_worker_frozen_in_the_middle_of_a_copy_costs_no_step(tmp_path: Path, calm: Calm) -> None:
    # Snapshots after step 1, 7, 13. Until the frozen one is killed it has the lock.
    launch = ["--hang-timeout", "2"]
    with Run(tmp_path / "stormy", 3, "snapshot_every=6", asks=["freeze-0-13-0"], launch=launch) as stormy:
        stormy.ended()

    assert [r["rank"] for r in stormy.of("frozen")] == [0]
    assert stormy.began(1) == 13
    assert "restored step 13 from memory (of generation 0); 0 steps are repeated" in stormy.job.output
    assert_same(stormy, calm(3))


def test_a_corrupt_copy_is_skipped_and_said(tmp_path: Path, calm: Calm) -> None:
    # All die in step 20; before it, a byte of the newest copy is changed.
    asks = ["hold-0-20-0", *(f"together-0-20-{rank}" for rank in range(2))]
    with Run(tmp_path / "stormy", 2, "snapshot_every=6", asks=asks) as stormy:
        wait_for(lambda: stormy.of("held"), "step 20")
        memory = Path(stormy.of("began", rank=0)[0]["memory"])
        steps = {path: int.from_bytes(path.read_bytes()[32:40], "little") for path in memory.glob("training.state-?")}
        assert set(steps.values()) == {13, 19}
        newest = max(steps, key=lambda path: steps[path])
        with newest.open("r+b") as file:
            file.seek(-5000, 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 255]))

        (stormy.folder / "hold-0-20-0").unlink()
        stormy.ended()

    assert f"skipping the copy of step 19 in {newest}: its checksum is wrong" in stormy.job.output
    assert stormy.began(1) == 13
    assert "6 steps are repeated" in stormy.job.output
    assert_same(stormy, calm(2))
