"""The training in tests of the link: counted steps over gloo. The ranks stop together and lose no step.

Run as `listener.py FOLDER`, with the records and failures of reducer.py. A step is an all-reduce. At a stop and at a
failure the node's memory keeps the step's number. The next generation goes on from the newest number that any node has.
The file FOLDER/end ends all ranks at the same step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from reducer import FOLDER, RANK, STEP_S, WORLD_SIZE, moment, record

from elaunch.trainer import link

MEMORY = Path(os.environ["ELAUNCH_MEMORY"])
done = 0


def keep(step: int) -> None:
    partial = MEMORY / f".step-{RANK}"
    partial.write_text(str(step))
    partial.rename(MEMORY / f"step-{RANK}")


def on_stop(reason: str) -> None:
    record("asked", reason=reason)


def on_peer_failed(generation: int) -> None:
    keep(done)
    record("saved", step=done, failed=generation)
    link.saved(done)


def newest() -> int:
    kept = max((int(path.read_text()) for path in MEMORY.glob("step-*")), default=0)
    known = torch.tensor(kept)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    return int(known)


def main() -> None:
    global done
    signal.signal(signal.SIGTERM, lambda *_: record("signalled"))
    record("started")
    link.listen(on_stop=on_stop, on_peer_failed=on_peer_failed)
    dist.init_process_group("gloo")
    done = newest()
    while True:
        here = torch.tensor([1, int((FOLDER / "end").exists())])
        dist.all_reduce(here)
        assert int(here[0]) == WORLD_SIZE
        done += 1
        record("step", step=done)
        link.report(done)
        if here[1]:
            break
        moment()
        if link.should_stop(every=3):
            keep(done)
            record("stopped", step=done)
            sys.exit(143)
        time.sleep(STEP_S)
    record("ended", step=done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
