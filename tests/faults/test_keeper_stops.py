"""Stops at a step boundary, durable checkpoints, and the keeper without elaunch or without memory."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from elaunch.trainer.checkpoint.storage import marks
from tests.faults.keeper_runs import KEPT, STEPS, Calm, Kept, Run, assert_same
from tests.harness import environment, wait_for
from tests.ranks import RankForker, Ranks
from tests.warm import SharedStart


@dataclass(frozen=True)
class Stopped:
    """A job of two workers that was signalled in step 31, after both had died in step 20; then the same training again.

    `done` has the last step of each rank, `marks` the steps of the checkpoints.
    """

    run: Kept
    code: int
    output: str
    done: dict[int, int]
    marks: list[int]
    output_again: str
    marks_again: list[int]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, forker: RankForker, keeper_start: SharedStart) -> Stopped:
    """The second time is without an agent: forked ranks import nothing."""
    folder = tmp_path_factory.mktemp("stopped")
    # The only copy in memory is that of step 1.
    checkpoints = folder / "checkpoints"
    options = ("lose_at_most=100", "looks=1", f"checkpoints={checkpoints}", "checkpoint_every=6")
    asks = ["together-0-20-0", "together-0-20-1", "hold-1-31-1"]
    with Run(folder / "run", 2, *options, asks=asks, shared=keeper_start) as run:
        wait_for(lambda: run.of("held"), "step 31")
        run.job.signal(signal.SIGTERM)
        wait_for(lambda: len(run.of("requested")) == 2, "all are requested to stop")
        (run.folder / "hold-1-31-1").unlink()
        code, output = run.job.wait(), run.job.output
    done, there = {r["rank"]: r["step"] for r in run.of("done")}, [mark.step for mark in marks(checkpoints)]

    with Ranks(forker, 2, KEPT, str(run.folder), str(STEPS), *options, env={"ELAUNCH_GENERATION": "0"}) as ranks:
        ended = ranks.end()
    again = "".join(rank.err for rank in ended)
    assert [rank.code for rank in ended] == [0, 0], again

    return Stopped(run, code, output, done, there, again, [mark.step for mark in marks(checkpoints)])


@pytest.mark.slow
def test_a_stopped_job_goes_on_from_its_checkpoint_bit_for_bit(stopped: Stopped, calm: Calm) -> None:
    assert stopped.code == 143, stopped.output
    assert "stopped after step 31, on a request to leave" in stopped.output
    assert stopped.marks == [24, 30, 31]
    assert stopped.done == {0: 31, 1: 31}
    assert "restored step 31 from the checkpoint in" in stopped.output_again
    assert stopped.marks_again == [31, 36, 40]
    assert_same(stopped.run, calm(2))


@pytest.mark.slow
def test_state_in_parts_goes_on_from_a_checkpoint_on_another_number_of_workers(tmp_path: Path) -> None:
    options = ("lose_at_most=5", "looks=1", "shards=fsdp2", f"checkpoints={tmp_path / 'checkpoints'}")
    with Run(tmp_path / "run", 3, *options, asks=["hold-0-20-1"]) as run:
        wait_for(lambda: run.of("held"), "step 20")
        run.job.signal(signal.SIGTERM)
        wait_for(lambda: len(run.of("requested")) == 3, "all are requested to stop")
        (run.folder / "hold-0-20-1").unlink()
        assert run.job.wait() == 143, run.job.output

    run.start(2, *options)
    with run:
        run.ended()

    assert "restored step 20 from the checkpoint in" in run.job.output
    assert {r["step"] for r in run.of("end")} == {40}


@pytest.mark.slow
def test_under_torchrun_a_restart_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    # Without this switch torchrun 2.13 reads the last group's keys again after a restart, and hangs.
    environ = environment(
        {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ELAUNCH_GENERATION": "0"}
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", "2", str(KEPT), str(tmp_path), "40", "lose_at_most=1"]
    command += [f"checkpoints={tmp_path / 'checkpoints'}", "checkpoint_every=10"]
    (tmp_path / "crash-0-25-1").touch()

    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr
    assert re.search(r"restored step (10|20) from the checkpoint", ended.stderr)
