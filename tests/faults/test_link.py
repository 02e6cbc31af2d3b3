"""The link with real workers: a worker that listens for failures saves before its end."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from tests.faults.processes import SAY, Watched
from tests.harness import script
from tests.warm import SharedStart

# Rank 0 waits for rank 1 in a collective that rank 1 never enters. None of their connections ends.
STUCK = f"""{SAY}
import torch
import torch.distributed as dist
from elaunch.trainer import link

def save(generation):
    print(f"rank {{RANK}} saves after {{generation}}", flush=True)
    link.saved(41)

dist.init_process_group("gloo")
two = dist.new_group([0, 1])
if GENERATION == 0:
    link.listen(on_peer_failed=save)
    dist.barrier()
    if RANK == 0:
        open("waits", "w").close()
        dist.all_reduce(torch.ones(1), group=two)
    while RANK == 2 and not os.path.exists("waits"):
        time.sleep(0.01)
    if RANK == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
groups = len(dist.distributed_c10d._world.pg_map)
assert not link.should_stop()
print("goes on with", len(dist.distributed_c10d._world.pg_map) - groups, "new groups", flush=True)
"""


def timeline(logs: Path) -> list[dict[str, Any]]:
    (path,) = logs.glob("*_*/timeline.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_survivor_that_is_stuck_in_a_collective_saves_and_is_killed_at_once(
    tmp_path: Path, torch_start: SharedStart
) -> None:
    script(tmp_path, STUCK)
    options = ("--log-dir", "logs", "--failure-grace", "50", "--nproc-per-node", "3")
    with Watched(tmp_path, *torch_start.options, *options, "train.py", env=torch_start.env) as job:
        assert job.wait() == 0, job.output

    assert "rank 0 saves after 0" in job.stdout
    assert "rank 1 saves after 0" in job.stdout
    # To agree on a stop takes no group.
    assert job.stdout.count("goes on with 0 new groups") == 3
    first = [e for e in timeline(tmp_path / "logs") if e["generation"] == 0]
    for rank in (0, 1):
        told, saved, exited = (
            next(i for i, e in enumerate(first) if e["event"] == name and e.get("rank", rank) == rank)
            for name in ("told", "saved", "exited")
        )
        killing = next(i for i, e in enumerate(first) if e["event"] == "killing" and i > saved)
        assert told < saved < killing < exited, first
        assert first[saved]["step"] == 41
        assert first[exited]["code"] == -signal.SIGKILL
    # A SIGTERM would have ended the workers before they saved.
    assert not [e for e in first if e["event"] == "stopping"]
    assert "still ran after" not in job.stderr
    assert re.search(r"rank 2 .* was killed by SIGKILL in generation 0; stopping 2 others", job.stderr)
    assert "1 of 3 restarts used" in job.stderr
