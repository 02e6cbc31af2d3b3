"""The bundled trainer, struck at whatever moment: no step lost while a worker lives, no sample twice, the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.trainings import RESTORED, OneNode
from tests.harness import slow


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, OneNode]:
    """The runs that nothing happens to, by number of workers; made when they are first asked for."""
    folder = tmp_path_factory.mktemp("calm")

    class Calm(dict[int, OneNode]):
        def __missing__(self, workers: int) -> OneNode:
            with OneNode(folder / str(workers), workers) as run:
                self[workers] = run.ended()
            assert "restored" not in run.job.output
            run.assert_complete()
            return run

    return Calm()


@pytest.mark.parametrize(("workers", "first"), [(3, "publish"), *(slow(workers, "forward") for workers in (2, 3, 4))])
def test_a_kill_at_any_moment_loses_no_step_and_changes_no_bit(
    tmp_path: Path, calm: dict[int, OneNode], workers: int, first: str
) -> None:
    last = workers - 1
    moments = [("forward", 1, last), ("forward", 3, 0), ("backward", 5, 0), ("backward", 6, last), ("loss", 7, last)]
    moments += [("optimizer", 8, 0), ("optimizer", 9, last), ("unwritten", 11, 0), ("committed", 13, last)]
    # Twice in a row, and before it has computed anything.
    moments += [("restore", 0, 0), ("restore", 0, last), ("start", 0, 0)]
    moments += [("copy", 16, 0), ("publish", 20, 0), ("published", 30, 0), ("evaluating", 0, last), ("result", 0, 0)]
    # Of keepers all but the last four are tested in test_keeper_kills.py too.
    moments = moments[[moment for moment, _, _ in moments].index(first) :]
    asks = [f"{moment}-{generation}-{step}-{rank}" for generation, (moment, step, rank) in enumerate(moments)]

    with OneNode(tmp_path / "run", workers, "--snapshot-every", "1", asks=asks) as run:
        run.ended()

    assert run.struck() == asks
    restored = re.findall(RESTORED, run.job.output)
    assert len(restored) >= len(moments) - 4
    assert {repeated for *_, repeated in restored} == {"0"}
    assert run.result["restarts"] == len(moments)
    run.assert_complete()
    run.assert_same(calm[workers])


@pytest.mark.parametrize("workers", [slow(2), slow(4)])
def test_all_but_one_are_killed_and_the_last_one_saves(tmp_path: Path, calm: dict[int, OneNode], workers: int) -> None:
    asks = [f"together-0-7-{rank}" for rank in range(1, workers)]
    asks += [f"together-1-12-{rank}" for rank in range(workers - 1)]

    with OneNode(tmp_path / "run", workers, "--snapshot-every", "100", asks=asks) as run:
        run.ended()

    assert sorted(run.struck()) == sorted(asks)
    assert (run.began(1), run.began(2)) == (6, 11)
    run.assert_complete()
    run.assert_same(calm[workers])


@pytest.mark.slow
def test_all_workers_killed_at_once_repeat_the_steps_since_the_snapshot_and_all_are_counted(
    tmp_path: Path, calm: dict[int, OneNode]
) -> None:
    asks = [f"together-{generation}-20-{rank}" for generation in range(2) for rank in range(3)]

    with OneNode(tmp_path / "run", 3, "--snapshot-every", "8", asks=asks) as run:
        run.ended()

    assert sorted(run.struck()) == sorted(asks)
    # Snapshots after step 1, 9 and 17; what was lost twice counts twice.
    assert [run.began(1), run.began(2)] == [17, 17]
    assert "restored step 17 from memory (of generation 0); 2 steps are repeated" in run.job.output
    assert "4 steps that were done were lost and computed again" in run.result["ledger"]
    run.assert_complete(lost=4)
    run.assert_same(calm[3])


@pytest.mark.parametrize(("moment", "rank"), [("forward", 2), slow("backward", 0)])
def test_a_frozen_worker_is_found_and_costs_no_step(
    tmp_path: Path, calm: dict[int, OneNode], moment: str, rank: int
) -> None:
    asks = [f"freeze:{moment}-0-7-{rank}"]

    with OneNode(tmp_path / "run", 3, "--snapshot-every", "100", asks=asks, launch="--hang-timeout 3") as run:
        run.ended()

    assert run.struck("frozen") == [f"{moment}-0-7-{rank}"]
    assert re.search(rf"rank {rank} \(.*\) hung: .* as its process is stopped \(by SIGSTOP", run.job.output)
    assert run.began(1) == 6
    run.assert_complete()
    run.assert_same(calm[3])
