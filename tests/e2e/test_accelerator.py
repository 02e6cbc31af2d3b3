"""A step, a kill and a restart on what this machine has: NCCL on a GPU where there is one, else gloo on CPUs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.harness import Job, script, slow

TRAIN = """
import os, signal
import torch
import torch.distributed as dist

assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
model = torch.nn.Linear(64, 64).to(device)
ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
optimizer = torch.optim.AdamW(ddp.parameters())
ddp(torch.ones(8, 64, device=device)).sum().backward()
optimizer.step()
total = torch.ones(1, device=device)
dist.all_reduce(total)
name = torch.cuda.get_device_name(device) if cuda else "CPU"
print(f"trained: generation {os.environ['ELAUNCH_GENERATION']}, pid {os.getpid()}, {dist.get_backend()}, {name}")
if os.environ["ELAUNCH_GENERATION"] == "0":
    signal.pause()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", [(), slow(("--no-preload",))], ids=["forked", "exec'd"])
def test_a_killed_worker_trains_again_on_the_same_device(tmp_path: Path, how: tuple[str, ...]) -> None:
    script(tmp_path, TRAIN)
    with Job(tmp_path, *how, "--nproc-per-node", "1", "train.py") as job:
        first = job.wait_for_output(r"^trained: generation 0, pid (\d+), (.*)$")

        os.kill(int(first[1]), signal.SIGKILL)

        second = job.wait_for_output(r"^trained: generation 1, pid (\d+), (.*)$")
        assert job.wait() == 0, job.output
    print(second[2])
    assert second[2] == first[2]
    assert "fresh interpreter" not in job.output
