"""What a keeper and its agent have to say to each other: large states, two keepers, the end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.faults.processes import SAY, Watched
from tests.harness import script, slow

TORCH = ("--preload", "torch")

# Of two trainings that know nothing of each other, the state of the second takes long to be saved.
TWO = f"""{SAY}
import torch
import torch.distributed as dist
from elaunch.trainer import Keeper

class Slow:
    def state_dict(self):
        if os.path.exists("failed") and GENERATION == 0:
            open("failed", "a").write(".")
            time.sleep(3)
        return {{}}

    def load_state_dict(self, state):
        pass

def kept(name, **options):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    return optimizer, Keeper(model, optimizer, name=name, snapshot_every=1000, **options)

dist.init_process_group("gloo")
(_, one), (_, other) = trainings = kept("one"), kept("other", extra=Slow())
with one, other:
    print(f"began {{one.step}} {{other.step}}", flush=True)
    for step, _ in zip(one.steps(9), other.steps(9)):
        if GENERATION == 0 and step == 6:
            if RANK == 1:
                open("failed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            STUCK
        dist.barrier()
        for optimizer, keeper in trainings:
            with keeper.commit():
                optimizer.step()
print("end", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("stuck", ["pass", slow("time.sleep(600)")], ids=["raises", "stuck"])
def test_two_keepers_are_both_given_the_time_that_they_need_to_save(tmp_path: Path, stuck: str) -> None:
    script(tmp_path, TWO.replace("STUCK", stuck))
    with Watched(tmp_path, *TORCH, "--nproc-per-node", "2", "train.py", env={"OMP_NUM_THREADS": "1"}) as job:
        assert job.wait() == 0, job.output

    assert re.findall(r"began (\d+) (\d+)", job.stdout) == [("0", "0")] * 2 + [("5", "5")] * 2
    assert len((tmp_path / "failed").read_text()) == 1, "the state was to be slow once"
    assert "SIGKILL" not in re.sub(r"rank 1 .* was killed by SIGKILL", "", job.stderr)


@pytest.mark.slow
def test_a_state_that_is_not_saved_within_the_stop_grace_is_said_and_the_last_copy_counts(tmp_path: Path) -> None:
    script(tmp_path, TWO.replace("STUCK", "time.sleep(600)"))
    options = (*TORCH, "--failure-grace", "0.5", "--stop-grace", "1", "--nproc-per-node", "2")
    with Watched(tmp_path, *options, "train.py", env={"OMP_NUM_THREADS": "1"}) as job:
        assert job.wait() == 0, job.output

    assert "local rank 0 was still saving 1 s after the failure; SIGKILL" in job.stderr
    assert re.findall(r"began (\d+) (\d+)", job.stdout)[2:] == [("5", "1")] * 2


ENDS = """
import os, signal, sys, time
import torch
from elaunch.trainer import Keeper

def own(signum, frame):
    print("handled by its own", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, own)
model = torch.nn.Linear(2, 1)
with Keeper(model, torch.optim.AdamW(model.parameters())) as keeper:
    for step in keeper.steps(3):
        with keeper.commit():
            pass
print("evaluates", flush=True)
time.sleep(600)
"""


def test_after_its_keeper_has_ended_a_program_gets_the_signals_itself(tmp_path: Path) -> None:
    script(tmp_path, ENDS)
    with Watched(tmp_path, *TORCH, "train.py") as job:
        job.wait_for_output("^evaluates")

        job.signal(signal.SIGTERM)

        assert job.wait() == 143, job.output
    assert "handled by its own" in job.stdout
    assert "SIGKILL" not in job.stderr.replace("SIGKILL in 30 s", "")
