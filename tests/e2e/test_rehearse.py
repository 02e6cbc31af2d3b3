"""`elaunch rehearse` with real jobs."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness import COMMAND, RUN_LIMIT_S, Job, environment, script

_TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from elaunch.trainer import Batches, Keeper

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
batches = Batches(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Dropout(0.2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
noise = torch.Generator().manual_seed(dist.get_rank())
per_rank = [batches, noise] if sys.argv[1] == "kept" else [batches]
with Keeper(model, optimizer, per_rank=per_rank, checkpoints=sys.argv[2]) as keeper:
    if sys.argv[3:] and dist.get_rank() == 0:
        print(keeper.step, file=open(sys.argv[3], "a"))
    for step in keeper.steps(1000):
        x, y = next(batches)
        loss = (model(x + torch.randn(x.shape, generator=noise)) - y).square().mean()
        loss.backward()
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
"""
_PLAIN = """
import os, pathlib, time
begin = int(open("checkpoint").read()) if os.path.exists("checkpoint") else 0
for step in range(begin, 20):
    print("step", step, flush=True)
    pathlib.Path("new").write_text(str(step // 5 * 5))
    os.replace("new", "checkpoint")
    time.sleep(0.1)
"""


def rehearse(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = environment({"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)})
    return subprocess.run(
        [*COMMAND, "rehearse", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=4 * RUN_LIMIT_S,
        check=False,
    )


@pytest.mark.slow
def test_a_right_script_comes_back_equal_and_its_checkpoints_are_left_alone(tmp_path: Path) -> None:
    script(tmp_path, _TRAINING)

    ended = rehearse(tmp_path, "--steps", "12", "--nproc-per-node", "2", "train.py", "kept", str(tmp_path / "mine"))

    assert ended.returncode == 0, ended.stdout + ended.stderr
    for failure in (
        "after a backward pass of step 6",
        "within the commit of step 4",
        "all ranks, in step 8",
        "the agent",
    ):
        assert re.search(rf"{failure}.* equal ", ended.stdout), ended.stdout
    assert "compared: bit for bit, 12 steps of 2 ranks" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
def test_a_generator_outside_the_keepers_state_is_named_with_the_first_step(tmp_path: Path) -> None:
    script(tmp_path, _TRAINING)
    restored = tmp_path / "restored"

    words = ("train.py", "unkept", "checkpoints", str(restored))
    ended = rehearse(tmp_path, "--steps", "12", "--nproc-per-node", "2", *words)

    assert ended.returncode == 1, ended.stdout + ended.stderr
    # After two runs without a failure comes this one. It is restored after step 5 instead of 6 if rank 0 gets the
    # agent's message of the failure before it has committed step 6.
    before, again = map(int, restored.read_text().split()[2:4])
    assert (before, again) in ((0, 5), (0, 6))
    first = f"rank 1, after a backward pass of step 6: first after step {again + 1} (rank 0, 1): the loss"
    assert first in ended.stdout, ended.stdout
    assert "likely reason: the Keeper does not keep generator `noise`: pass it as per_rank=[…]" in ended.stdout


@pytest.mark.slow
def test_of_a_script_without_a_keeper_the_lines_are_compared_and_counted(tmp_path: Path) -> None:
    script(tmp_path, _PLAIN)

    ended = rehearse(tmp_path, "--nproc-per-node", "1", "train.py")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    # A killed rank goes back to the checkpoint of step 5, or of step 10 on a slow machine.
    assert len(re.findall("after line 10 of the output +equal +[0-9]+ lines? ", ended.stdout)) == 2, ended.stdout


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    script(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(600)\n")

    with Job(tmp_path, "rehearse", "train.py", env={"TMPDIR": str(tmp_path)}) as job:
        job.wait_for_output("rehearse: no failure")
        job.signal(signal.SIGINT)
        assert job.wait() == 130, job.output

    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
