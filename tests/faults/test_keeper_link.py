"""A failure while a keeper waits for a node that is silent."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.processes import SAY, Watched
from tests.faults.test_link import timeline
from tests.harness import script
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


# Ranks 0 and 2 are on one node, rank 1 is on another. No packet gets between the two nodes. Rank 2 dies when both
# others wait: a rank that is still in the collective before would fail there, before it is notified of the death.
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


def test_a_rank_that_waits_for_a_silent_node_saves_after_a_failure(tmp_path: Path, torch_start: SharedStart) -> None:
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
