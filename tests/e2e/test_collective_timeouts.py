"""A rank that is late for longer than the process group's timeout: nobody dies, and its peers' collective fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import Job, script
from tests.warm import SharedStart

# Each step of a busy machine must come to its collectives within this time.
TIMEOUT_S, LATE_S = 20, "600"

# In generation 0 rank LATE sleeps before its fifth step, for longer than its peers wait. All ranks have the same batch,
# so with two or four of them the mean of their gradients is to the bit that of one process.
PROGRAM = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from elaunch.trainer import Keeper, link
HOW, LATE, SLEEP_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
RANK, GENERATION = dist.get_rank(), int(os.environ["ELAUNCH_GENERATION"])
def made():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
def backward(model, step):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    (model(inputs) - inputs.flip(1)).square().mean().backward()
def load(step):
    if (GENERATION, RANK, step) == (0, LATE, 5):
        time.sleep(SLEEP_S)
def kept(network, optimizer):
    model = DistributedDataParallel(network)
    with Keeper(model, optimizer, per_rank=(), lose_at_most=1000, say=lambda text: print(text, flush=True)) as keeper:
        for step in keeper.steps(8):
            load(step)
            backward(model, step)
            with keeper.commit():
                optimizer.step()
                optimizer.zero_grad()
def plain(network, optimizer):
    model = DistributedDataParallel(network)
    for step in range(1, 9):
        load(step)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
network, optimizer = made()
(kept if HOW == "kept" else plain)(network, optimizer)
alone, its = made()
for step in range(1, 9):
    backward(alone, step)
    its.step()
    its.zero_grad()
same = all(map(torch.equal, network.parameters(), alone.parameters()))
print(f"rank {RANK} ends as one process does: {same}", flush=True)
dist.destroy_process_group()
""".replace("TIMEOUT_S", str(TIMEOUT_S))
NAMED = (
    rf"did not come to the collective that timed out on rank 0 \(the all-reduce of a backward pass for {TIMEOUT_S} s\);"
    r" it sleeps \(load, train\.py:\d+\), in generation 0"
)


@pytest.mark.slow
def test_a_late_rank_is_named_no_step_is_lost_and_the_group_starts_again(
    tmp_path: Path, keeper_start: SharedStart
) -> None:
    script(tmp_path, PROGRAM)

    words = (*keeper_start.options, "--nproc-per-node", "2", "train.py", "kept", "1", LATE_S)
    with Job(tmp_path, *words, env=keeper_start.env) as job:
        assert job.wait() == 0, job.output

    assert re.search(rf"^elaunch: rank 1 \(local rank 1 on \S+, pid \d+\) {NAMED}", job.stderr, re.MULTILINE)
    assert "restored step 4 from memory (of generation 0); 0 steps are repeated" in job.stdout
    assert job.stdout.count("ends as one process does: True") == 2
    # The late rank has saved what it has, and is ended at once: no grace had to pass.
    assert "SIGKILL" not in job.stderr, job.stderr
