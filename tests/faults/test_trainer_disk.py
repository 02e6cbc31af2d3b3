"""The bundled trainer with a full disk, or with damaged files on the disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.trainer.checkpoint.storage import storage_at
from tests.faults.processes import small_disk
from tests.faults.trainings import GENTLE, STEPS, CalmTrainings, OneNode
from tests.harness import wait_for


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
        # Room for a few checkpoints.
        small_disk(folder / "disk", "size=4m") as disk,
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
        wait_for(lambda: "it is the last one, and is retried for 60 s" in run.job.output, "the failure")
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
    failed = "the checkpoint of step 30 could not be written: No space left on device; the newest one"
    assert failed in run.job.output
    assert re.search(r"metrics\.jsonl lacks steps from \d+ on: No space left on device", run.job.output)
    assert [mark.step for mark, _ in storage_at(run.out / "checkpoints").found()] == [10, STEPS]
    assert run.result["steps_lost"] == 0
    assert run.result["samples_seen"] == calm.result["samples_seen"]
    assert run.result["params_sha256"] == calm.result["params_sha256"]
    assert run.losses.items() <= calm.losses.items()
    assert set(run.losses) >= {*range(1, 15), *range(36, STEPS)}
    assert run.result["ledger"].startswith("not exactly once")
