"""After a failure the worker store ends with the workers, unless one of them may still ask it for something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
if "ask" in sys.argv and RANK == 2:
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


def events(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("logs/*_*/timeline.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("may_ask", [False, True], ids=["nobody asks", "one saves"])
def test_the_store_lives_as_long_as_somebody_may_ask_it(tmp_path: Path, may_ask: bool) -> None:
    script(tmp_path, PROGRAM)

    ask = ("ask",) if may_ask else ()
    job = finished(tmp_path, "--nproc-per-node", "3", "--failure-grace", "60", "--log-dir", "logs", "train.py", *ask)

    assert job.code == 0, job.output
    assert ("the store said yes" in job.output) == may_ask
    lines = events(tmp_path)
    codes = {line["code"] for line in lines if line["event"] == "store_exited" and line["generation"] == 0}
    # Killed with the workers; or told to end after the last one. The news of that may come after its generation.
    assert codes <= ({0} if may_ask else {-9})
    assert "worker store" not in job.stderr
    # It is not forgotten that its workers had used it.
    (restarting,) = (line for line in lines if line["event"] == "restarting")
    assert restarting["failure"]["progressed"] is True
