"""The training of the fault tests on nodes: all-reduces over gloo, until all ranks are to end.

Run as `reducer.py FOLDER`, a folder that all nodes see. Each event is written as one line of JSON to FOLDER/records and
to stdout. A file FOLDER/end ends all ranks at the same step. A file called
FOLDER/step-<generation>-<rank> makes that rank do what is in it after its next step: `exit N`, `kill` or `raise`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(sys.argv[1])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["ELAUNCH_GENERATION"])
# A step is recorded this often, so that the tests see that training goes on.
STEPS_PER_RECORD = 4
STEP_S = float(os.environ.get("STEP_S", "0.05"))


def record(event: str, **fields: object) -> None:
    """Write a record for the test, which does not depend on the agent, and for the log."""
    line = json.dumps(
        {
            "event": event,
            "generation": GENERATION,
            "rank": RANK,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "group_rank": int(os.environ["GROUP_RANK"]),
            "world_size": WORLD_SIZE,
            "master_addr": os.environ["MASTER_ADDR"],
            "master_port": int(os.environ["MASTER_PORT"]),
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "at_s": time.monotonic(),
            **fields,
        }
    )
    # What the test has read is in the log too: a signal may come between the two.
    print("record", line, flush=True)
    with (FOLDER / "records").open("a") as file:
        file.write(line + "\n")


def moment() -> None:
    """Fail here, if the test asks for it."""
    path = FOLDER / f"step-{GENERATION}-{RANK}"
    if not path.exists():
        return
    words = path.read_text().split()
    path.unlink()
    record(words[0])
    match words:
        case ["exit", code]:
            sys.exit(int(code))
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["raise"]:
            raise RuntimeError(f"asked for by the test, in generation {GENERATION}")


def main() -> None:
    record("started")
    dist.init_process_group("gloo")
    step = 0
    while True:
        # The number of ranks, and the number of ranks that have seen the end.
        here = torch.tensor([1, int((FOLDER / "end").exists())])
        dist.all_reduce(here)
        assert int(here[0]) == WORLD_SIZE
        if step % STEPS_PER_RECORD == 0:
            record("step", step=step)
        if here[1]:
            break
        moment()
        step += 1
        time.sleep(STEP_S)
    record("ended", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
