"""A step, a kill and a restart on what this machine has: NCCL on a GPU where there is one, else gloo on CPUs.

The other tests need a GPU. All are slow ones, so that `make test` skips nothing. They run what the unit tests show with
stand-ins for a GPU. Several ranks: test_nccl.py. See docs/gpu.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import REPOSITORY, RUN_LIMIT_S, Job, environment, script

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


# Without a GPU test_life.py shows the same.
@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--no-preload",)], ids=["forked", "exec'd"])
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


def need_gpus(count: int) -> None:
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"{count} GPUs are needed, and there are {torch.cuda.device_count()}")


def output_of(*command: str, **env: str) -> str:
    """What a Python process prints that must succeed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=environment(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BESIDE = """
import time, torch
from elaunch.trainer.memory.device_copy import GpuCopies

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
state = torch.randn(64 << 20, device=device)
scaler = torch.amp.GradScaler("cuda")
scaler.scale(torch.ones(1, device=device))
gpu = GpuCopies(device)
gpu.after_commit()
target = torch.zeros(state.shape)
gpu.copy([target], [state])
torch.cuda.synchronize()
# Some seconds of work on the training's stream, and a change behind it. CUDA loads a kernel at its first use, and waits
# for all streams meanwhile; so both were used before.
torch.cuda._sleep(1)
state.add_(1)
torch.cuda._sleep(8_000_000_000)
state.add_(1)
assert not torch.cuda.current_stream(device).query(), "the stream is not stuck"
begun_s = time.monotonic()
with gpu.reading():
    scale = scaler.state_dict()["scale"]
gpu.copy([target], [state])
took_s = time.monotonic() - begun_s
assert not torch.cuda.current_stream(device).query(), f"the copy waited for the stream, for {took_s:.1f} s"
torch.cuda.synchronize()
assert scale == 65536
assert torch.equal(target + 1, state.cpu())
print(f"copied beside a stuck stream: {state.nbytes / took_s / 1e9:.1f} GB/s")
"""


@pytest.mark.slow
def test_the_state_is_copied_beside_a_stuck_stream() -> None:
    need_gpus(1)

    print(output_of("-c", BESIDE))


@pytest.mark.slow
def test_types_and_memory_formats_are_kept_on_the_gpu() -> None:
    need_gpus(1)

    tests = "tests/unit/trainer/keeper/test_formats.py"
    print(output_of("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, ELAUNCH_TEST_DEVICE="cuda"))
