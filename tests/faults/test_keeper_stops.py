"""Stops at a step boundary, durable checkpoints, and the keeper where there is no elaunch or no memory."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.trainer.checkpoint.catalog import marks
from tests.faults.keeper_runs import KEPT, RESTORED, Calm, Run, assert_same
from tests.harness import Job, environment, slow, wait_for

SINGLE_THREAD = {"OMP_NUM_THREADS": "1"}
SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "ELAUNCH_GENERATION": "0"}


def again(run: Run, workers: int, *options: str) -> Run:
    """The same command in the same folder once more."""
    words = ["--nproc-per-node", str(workers), "--max-restarts", "30", str(KEPT), str(run.folder), "40", *options]
    run.job = Job(run.folder, *words, env={"OMP_NUM_THREADS": "1"})
    return run


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), slow(signal.SIGINT, 130)])
def test_a_stopped_job_goes_on_from_its_checkpoint_bit_for_bit(
    tmp_path: Path, calm: Calm, signum: signal.Signals, code: int
) -> None:
    options = ("snapshot_every=7", f"checkpoints={tmp_path / 'checkpoints'}")
    with Run(tmp_path / "stopped", 3, *options, asks=["hold-0-20-1"]) as run:
        wait_for(lambda: run.of("held"), "step 20")
        run.job.signal(signum)
        wait_for(lambda: len(run.of("told")) == 3, "all are told")
        (run.folder / "hold-0-20-1").unlink()
        assert run.job.wait() == code, run.job.output

    assert "stopped after step 20, as it was" in run.job.output
    assert [mark.step for mark in marks(tmp_path / "checkpoints")] == [20]
    assert {r["rank"]: r["step"] for r in run.of("done")} == {0: 20, 1: 20, 2: 20}

    with again(run, 3, *options):
        run.ended()

    assert "restored step 20 from the checkpoint in" in run.job.output
    assert [mark.step for mark in marks(tmp_path / "checkpoints")] == [20, 40]
    assert_same(run, calm(3))


@pytest.mark.slow
def test_the_newest_of_memory_and_disk_is_taken(tmp_path: Path, calm: Calm) -> None:
    # All die in step 20: the newest copy in memory is of step 17, the newest checkpoint of step 15.
    options = ("snapshot_every=8", f"checkpoints={tmp_path / 'checkpoints'}", "checkpoint_every=5")
    asks = [f"together-0-20-{rank}" for rank in range(3)] + ["forward-1-30-2"]

    with Run(tmp_path / "run", 3, *options, asks=asks) as run:
        run.ended()

    assert re.search(r"restored step 17 from memory \(of generation 0\); 2 steps are repeated", run.job.output)
    assert re.search(r"restored step 29 from memory .*; 0 steps are repeated", run.job.output)
    assert_same(run, calm(3))


def test_without_any_copy_in_memory_the_checkpoint_is_taken_and_what_is_repeated_is_said(
    tmp_path: Path, calm: Calm
) -> None:
    options = ("snapshot_every=100", f"checkpoints={tmp_path / 'checkpoints'}", "checkpoint_every=6")
    asks = [f"together-0-20-{rank}" for rank in range(2)]

    with Run(tmp_path / "run", 2, *options, asks=asks) as run:
        run.ended()

    # In memory there is step 1. The checkpoint of step 18 may be torn: then it is that of step 12.
    found = re.search(
        r"restored step (12|18) from the checkpoint in \S+; (\d) steps? (?:is|are) repeated", run.job.output
    )
    assert found, run.job.output
    assert int(found[1]) + int(found[2]) == 19
    assert_same(run, calm(2))


@pytest.mark.parametrize(("every", "began"), [(1, 19), slow(6, 19)])
def test_error_feedback_goes_back_to_where_every_piece_of_it_is(
    tmp_path: Path, calm: Calm, every: int, began: int
) -> None:
    options = (f"snapshot_every={every}", "hook=powersgd")
    with Run(tmp_path / "run", 3, *options, asks=["backward-0-22-1" if every == 6 else "backward-0-20-1"]) as run:
        run.ended()

    # Every 6: snapshots after step 1, 7, 13, 19. A failed backward pass has changed the error feedback.
    assert run.began(1) == began
    ((*_, repeated),) = re.findall(RESTORED, run.job.output)
    assert int(repeated) == (2 if every == 6 else 0)
    assert_same(run, calm(3, hook="powersgd"))


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["fsdp2", "zero"])
def test_state_in_parts_goes_back_to_the_snapshot_and_ends_the_same(tmp_path: Path, shards: str) -> None:
    options = ("snapshot_every=5", f"shards={shards}", f"checkpoints={tmp_path / 'checkpoints'}")
    asks = ["forward-0-14-2", "together-1-25-0", "together-1-25-1", "together-1-25-2"]
    with Run(tmp_path / "run", 3, *options, asks=asks) as run:
        run.ended()

    # Snapshots after step 1, 6, 11; and from there again after 16, 21. One more if all have said that it is whole.
    assert (run.began(1), run.began(2)) == (11, 21)
    assert re.findall(r"step (\d+) from memory \(of generation (\d), in parts\); (\d)", run.job.output) == [
        ("11", "0", "2"),
        ("21", "1", "3"),
    ]
    with Run(tmp_path / "calm", 3, *options[:2]) as calm:
        assert_same(run, calm.ended())


@pytest.mark.slow
def test_state_in_parts_goes_on_from_a_checkpoint_on_another_number_of_workers(tmp_path: Path) -> None:
    options = ("snapshot_every=5", "shards=fsdp2", f"checkpoints={tmp_path / 'checkpoints'}")
    with Run(tmp_path / "run", 3, *options, asks=["hold-0-20-1"]) as run:
        wait_for(lambda: run.of("held"), "step 20")
        run.job.signal(signal.SIGTERM)
        wait_for(lambda: len(run.of("told")) == 3, "all are told")
        (run.folder / "hold-0-20-1").unlink()
        assert run.job.wait() == 143, run.job.output

    with again(run, 2, *options):
        run.ended()

    assert "restored step 20 from the checkpoint in" in run.job.output
    assert {r["step"] for r in run.of("end")} == {40}


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for little."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting takes root")
    (folder / "memory").mkdir()
    yield folder / "memory"
    subprocess.run(["umount", folder], check=True)


def alone(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One worker of `kept.py` without an agent."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(KEPT), str(folder), "40", *options]
    environ = environment({**SINGLE, "MASTER_PORT": port, **env})
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_too_little_memory_is_one_sentence_and_no_failure(tmp_path: Path, small_memory: Path) -> None:
    ended = alone(tmp_path, "snapshot_every=1", ELAUNCH_MEMORY=str(small_memory))

    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "MB" in line]
    assert len(said) == 1
    assert re.search(r"shm has 0\.\d+ MB free and this node's copies of the training state take 0\.\d+ MB", said[0])
    assert "goes back to the last checkpoint" in said[0]


@pytest.mark.slow
def test_a_plain_python_process_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    options = ("snapshot_every=1", f"checkpoints={tmp_path / 'checkpoints'}", "checkpoint_every=10")
    (tmp_path / "forward-0-25-0").touch()

    killed = alone(tmp_path, *options)
    (tmp_path / "forward-0-25-0").unlink()
    ended = alone(tmp_path, *options)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"restored step (10|20) from the checkpoint", ended.stderr)
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))


@pytest.mark.slow
def test_under_torchrun_a_restart_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    # Without the switch torchrun 2.13 reads the last group's keys again after a restart, and hangs.
    environ = environment(
        {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ELAUNCH_GENERATION": "0"}
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", "2", str(KEPT), str(tmp_path), "40", "snapshot_every=1"]
    command += [f"checkpoints={tmp_path / 'checkpoints'}", "checkpoint_every=10"]
    (tmp_path / "crash-0-25-1").touch()

    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stderr
    assert re.search(r"restored step (10|20) from the checkpoint", ended.stderr)
