"""The bundled trainer with a full disk, or with damaged files on the disk."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaunch.trainer.checkpoint.storage import storage_at
from tests.faults.trainings import GENTLE, STEPS, CalmTrainings, OneNode
from tests.harness import RUN_LIMIT_S, wait_for


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system with room for a few checkpoints."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, timeout=RUN_LIMIT_S
    )
    if mounted.returncode:
        pytest.skip("mounting takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, timeout=RUN_LIMIT_S)


def fill(folder: Path) -> Path:
    """Fill the disk to the last byte. Returns the file that fills it."""
    path = folder / "filler"
    there = os.statvfs(folder)
    path.write_bytes(bytes(there.f_bavail * there.f_frsize))
    assert not os.statvfs(folder).f_bavail
    return path


@pytest.fixture(scope="module")
def full_twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneNode]:
    """A run whose disk is full during steps 15 to 36, in which a worker is killed, and again at the end."""
    folder = tmp_path_factory.mktemp("full")
    last = f"hold:forward-1-{STEPS}-0"
    # The whole run directory is on this disk. The ledger then has a gap, which its verdict names.
    asks = ["hold:forward-0-15-0", "forward-0-23-1", "hold:forward-1-36-0", last]

    with (
        small_disk(folder / "disk") as disk,
        OneNode(folder / "run", 2, *GENTLE, "--lose-at-most", "5", asks=asks, disk=disk) as run,
    ):
        run.wait_for("held", step=15)
        filler = fill(disk)
        run.release("forward-0-15-0")
        run.wait_for("held", step=36)
        filler.unlink()
        run.release("forward-1-36-0")
        run.wait_for("held", step=STEPS)
        filler = fill(disk)
        run.release(last.partition(":")[2])
        wait_for(lambda: "it is the last one: it is tried again for 60 s" in run.job.output, "the failure")
        filler.unlink()
        run.ended()
        yield run


@pytest.mark.slow
def test_a_full_disk_costs_lines_and_checkpoints_but_no_step_even_when_a_worker_is_killed(
    full_twice: OneNode, calm_training: CalmTrainings
) -> None:
    run, calm = full_twice, calm_training(2, *GENTLE)

    assert run.struck() == ["forward-0-23-1"]
    assert run.began(1) == 22
    assert re.search(
        r"the checkpoint of step 30 could not be written: No space left on device"
        r" \(0\.0 MB are free, it takes 0\.1 MB\); the newest one",
        run.job.output,
    )
    assert re.search(r"metrics\.jsonl misses steps from \d+ on: No space left on device", run.job.output)
    assert [mark.step for mark, _ in storage_at(run.out / "checkpoints").found()] == [10, STEPS]
    assert run.result["steps_lost"] == 0
    assert run.result["samples_seen"] == calm.result["samples_seen"]
    assert run.result["params_sha256"] == calm.result["params_sha256"]
    assert run.losses.items() <= calm.losses.items()
    assert set(run.losses) >= {*range(1, 15), *range(36, STEPS)}
    assert run.result["ledger"].startswith("not exactly once")


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_is_waited_for(full_twice: OneNode) -> None:
    run = full_twice

    assert f"the checkpoint of step {STEPS} could not be written: No space left on device" in run.job.output
    assert f"the checkpoint of step {STEPS} is written" in run.job.output
    assert storage_at(run.out / "checkpoints").found()[-1][0].step == STEPS
    assert run.result["steps_lost"] == 0


@pytest.mark.slow
def test_a_disk_that_stays_full_at_the_end_is_a_failure_on_all_ranks_and_a_restart_makes_no_step_again(
    tmp_path: Path,
) -> None:
    launch, asks = "--max-restarts 1 --hang-timeout 10", [f"hold:forward-0-{STEPS}-0"]
    with (
        small_disk(tmp_path / "disk") as disk,
        OneNode(tmp_path / "run", 2, asks=asks, launch=launch, disk=disk) as run,
    ):
        run.wait_for("held", step=STEPS)
        filler = fill(disk)
        run.release(f"forward-0-{STEPS}-0")
        run.ended(1)
        filler.unlink()

    assert re.search(r"rank 0 \(.*\) raised .*NotDurable: the end of the training is not on", run.job.output)
    said = [line for line in run.job.output.splitlines() if line.startswith("[0] ")]
    assert sum("it is the last one: it is tried again for 60 s" in line for line in said) == 2
    assert sum(f"restored step {STEPS} from memory" in line for line in said) == 1
    assert run.job.output.count("NotDurable: the end") >= 4
    assert not (run.out / "result.json").exists()


@pytest.mark.slow
def test_a_corrupt_newest_checkpoint_costs_the_steps_since_the_one_before_and_they_are_counted(
    tmp_path: Path, calm_training: CalmTrainings
) -> None:
    # Kill the agent, so that the workers and their memory are gone too.
    with OneNode(tmp_path / "run", 3, asks=["hold:forward-0-33-0"]) as run:
        run.wait_for("held")
        run.job.kill_agent()
        run.job.assert_nothing_is_left()
        run.assert_no_memory_is_left()
        run.release("forward-0-33-0")
        newest = run.out / "checkpoints" / storage_at(run.out / "checkpoints").found()[-1][1].name
        with next(newest.glob("*.distcp")).open("r+b") as file:
            file.seek(500)
            file.write(b"corrupt")

        run.start(3)
        run.ended()

    assert newest.name == "generation-0000-step-00000030"
    assert f"skipping {newest}: it is torn or corrupt" in run.job.output
    assert "restored step 20 from the checkpoint" in run.job.output
    # Steps 31 and 32 had no checkpoint, and that of steps 21 to 30 is skipped.
    run.assert_complete(lost=12)
    run.assert_same(calm_training(3))
