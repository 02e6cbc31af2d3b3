"""Two agents whose ranks wait for each other: `elaunch status` shows which rank does not wait."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness import Job, finished, free_ports, script, wait_for
from tests.warm import SharedStart

# Rank 1 sleeps before each collective: it uses no CPU, and rank 0 waits for it.
PROGRAM = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
end = torch.zeros(1)
while not end:
    if os.environ["RANK"] == "1":
        time.sleep(0.02)
        end += os.path.exists("end")
    dist.all_reduce(end)
dist.destroy_process_group()
"""
# The same command with a window of 30 samples, 20 a second.
QUICK = """
import sys
from elaunch.agent.diagnosis import collectives
from elaunch.agent.workers import group, observers
from elaunch.launcher.cli import main
collectives.WINDOW_SAMPLES, group._SAMPLE_S, observers._COUNT_EVERY_S = 30, 0.05, 0.05
sys.argv = ["elaunch", *sys.argv[4:]]
main()
"""


@pytest.mark.slow
def test_status_shows_for_which_share_of_the_time_each_rank_waits(tmp_path: Path, torch_start: SharedStart) -> None:
    (port,) = free_ports(1)
    script(tmp_path, PROGRAM)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "slow"]
    options += torch_start.options
    env = {**torch_start.env, "ELAUNCH_TOKEN": "0123456789abcdef0123456789abcdef"}
    prefix = (sys.executable, "-c", QUICK)
    with (
        Job(tmp_path, *options, "train.py", env=env, prefix=prefix) as one,
        Job(tmp_path, *options, "train.py", env=env, prefix=prefix) as other,
    ):

        def shares() -> list[float]:
            words = ["status", "slow", "--rdzv-endpoint", f"127.0.0.1:{port}", "--json"]
            shown = finished(tmp_path, *words, env=env)
            record = json.loads(shown.stdout) if shown.code == 0 else {"ranks": []}
            found = [rank["wait_share"] for rank in record["ranks"]]
            return found if len(found) == 2 and None not in found else []

        waits, works = wait_for(shares, "the shares of both ranks", every_s=0.5)
        (tmp_path / "end").touch()
        assert [job.wait() for job in (one, other)] == [0, 0], one.output + other.output
    assert waits > 0.5 > works
