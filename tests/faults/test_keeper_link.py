"""The messages between a keeper and its agent: large states, two keepers, the end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.faults.processes import SAY, Watched
from tests.faults.test_link import timeline
from tests.harness import script, slow
from tests.warm import SharedStart

# A busy machine may need longer than the default of 2 s until a worker says that it saves.
GRACE = ("--failure-grace", "60", "--stop-grace", "60")
# The trained model does not matter here. No optimizer of torch is used, since it would import torch's compiler.
STILL = """
class Still:
    def step(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
"""

# Two trainings that know nothing of each other. Saving the state of the second takes long.
TWO = f"""{SAY}{STILL}
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
    optimizer = Still()
    return optimizer, Keeper(torch.nn.Linear(2, 1), optimizer, name=name, lose_at_most=1000, **options)

torch.manual_seed(0)
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


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["pass", slow("time.sleep(600)")], ids=["raises", "stuck"])
def test_two_keepers_are_both_given_the_time_that_they_need_to_save(
    tmp_path: Path, torch_start: SharedStart, stuck: str
) -> None:
    script(tmp_path, TWO.replace("STUCK", stuck))
    options = (*torch_start.options, *GRACE, "--nproc-per-node", "2")
    with Watched(tmp_path, *options, "train.py", env=torch_start.env) as job:
        assert job.wait() == 0, job.output

    assert re.findall(r"began (\d+) (\d+)", job.stdout) == [("0", "0")] * 2 + [("5", "5")] * 2
    assert len((tmp_path / "failed").read_text()) == 1, "the state was to be slow once"
    assert "SIGKILL" not in re.sub(r"rank 1 .* was killed by SIGKILL", "", job.stderr)


# Ranks 0 and 2 are on one node, rank 1 is on another. No packet gets between the two nodes. Rank 2 dies when both
# others wait: a rank that is still in the collective before would fail there, before it is told of the death.
SILENT = f"""{SAY}{STILL}
memory = os.environ["ELAUNCH_MEMORY"] + f"/{{RANK % 2}}"
os.makedirs(memory, exist_ok=True)
os.environ |= {{"ELAUNCH_MEMORY": memory, "LOCAL_RANK": str(RANK // 2)}}
import threading
import torch
import torch.distributed as dist
from elaunch.trainer import Keeper
from elaunch.trainer.memory.mirror import Mirror

settle = Mirror.settle

def mark_and_settle(self, **given):
    if GENERATION == 0 and RANK < 2 and self._thread is not None:
        open(f"waits{{RANK}}", "w").close()
    return settle(self, **given)

def die():
    while not (os.path.exists("waits0") and os.path.exists("waits1")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

Mirror.settle = mark_and_settle
if GENERATION == 0 and RANK == 1:
    Mirror._run = lambda *_: time.sleep(600)
if GENERATION == 0 and RANK == 2:
    threading.Thread(target=die).start()
torch.manual_seed(0)
dist.init_process_group("gloo")
optimizer = Still()
with Keeper(torch.nn.Linear(2, 1), optimizer, lose_at_most=1) as keeper:
    print(f"began {{keeper.step}}", flush=True)
    for step in keeper.steps(9):
        with keeper.commit():
            optimizer.step()
dist.destroy_process_group()
"""


def test_who_waits_for_a_silent_node_saves_after_a_failure_all_the_same(
    tmp_path: Path, torch_start: SharedStart
) -> None:
    script(tmp_path, SILENT)
    options = (*torch_start.options, *GRACE, "--log-dir", "logs", "--nproc-per-node", "3")
    with Watched(tmp_path, *options, "train.py", env=torch_start.env) as job:
        assert job.wait() == 0, job.output

    # One snapshot was taken after step 1. The snapshot after step 2 was not complete yet. Rank 2 may have completed
    # step 3 before it died. If rank 1 ends first, rank 0 waits for it no more, and completes that step too.
    saved = {e["rank"]: e["step"] for e in timeline(tmp_path / "logs") if e["event"] == "saved"}
    assert saved.keys() == {0, 1}
    assert saved[1] == 2
    assert saved[0] in (2, 3)
    assert re.findall(r"began (\d+)", job.stdout) == ["0"] * 3 + [str(saved[0])] * 3


# Rank 0 fails when it is told to stop. Rank 1's keeper has ended by then. Neither rank is in a process group.
TOLD = f"""{SAY}{STILL}
import torch
from elaunch.trainer import Keeper

def kept(name):
    return Keeper(torch.nn.Linear(2, 1), Still(), name=name)

def fails():
    try:
        with kept("fails") as keeper:
            for step in keeper.steps(9):
                print("trains", flush=True)
                while not keeper._boundary._told:
                    time.sleep(0.01)
                raise ValueError("asked for by the test")
    finally:
        # As long as it takes to let go of a GPU.
        time.sleep(1)

def ends():
    def own(signum, frame):
        print("handled by its own", flush=True)
        sys.exit(143)

    signal.signal(signal.SIGTERM, own)
    with kept("ends") as keeper:
        for step in keeper.steps(3):
            with keeper.commit():
                pass
    print("evaluates", flush=True)
    time.sleep(600)

(fails, ends)[RANK]()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, torch_start: SharedStart) -> Watched:
    """The job of TOLD after a SIGTERM."""
    folder = tmp_path_factory.mktemp("told")
    script(folder, TOLD)
    with Watched(folder, *torch_start.options, "--nproc-per-node", "2", "train.py", env=torch_start.env) as job:
        job.wait_for_output(r"^\[0\] trains")
        job.wait_for_output(r"^\[1\] evaluates")
        job.signal(signal.SIGTERM)
        job.wait()
    return job
