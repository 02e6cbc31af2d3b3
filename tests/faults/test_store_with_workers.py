"""After a failure the worker store lives as long as a worker, which may still ask it for something."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness import finished, script

# Rank 1 is killed once all have their process group, and its peers wait. The last line is a rank's answer to SIGTERM.
PROGRAM = """
import os, signal, sys, time
import torch.distributed as dist
RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["ELAUNCH_GENERATION"])
dist.init_process_group("gloo")
dist.barrier()
if GENERATION:
    sys.exit()
store = dist.distributed_c10d._get_default_store()
def ask(*_):
    # The agent has been told of the failure long before.
    time.sleep(0.3)
    store.set("asked", "yes")
    print("the store said", store.get("asked").decode(), flush=True)
    os._exit(0)
if RANK == 2:
    signal.signal(signal.SIGTERM, ask)
store.add("ready", 1)
while RANK == 1 and int(store.get("ready")) < 3:
    time.sleep(0.02)
# Its peers' agent has heard of the group by then.
time.sleep(0.3)
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.05)
"""


def test_the_store_answers_a_worker_that_saves_after_a_failure(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)

    job = finished(tmp_path, "--nproc-per-node", "3", "--failure-grace", "60", "--log-dir", "logs", "train.py")

    assert job.code == 0, job.output
    assert "the store said yes" in job.output
    (path,) = tmp_path.glob("logs/*_*/timeline.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    codes = {line["code"] for line in lines if line["event"] == "store_exited" and line["generation"] == 0}
    # The news of its end may come after its generation.
    assert codes <= {0}
    assert "worker store" not in job.stderr
    # It is not forgotten that its workers had used it.
    (restarting,) = (line for line in lines if line["event"] == "restarting")
    assert restarting["failure"]["progressed"] is True
