"""Two agents whose ranks wait for each other: the slow one is named, though each node sees only its own ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.event_schema import check_event
from tests.harness import Job, free_ports, script
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
# The same command with a tenth of a second for each second, and a window of 3 s.
QUICK = """
import sys
from elaunch.agent.core import wait_shares
from elaunch.agent.workers import link, observers, slow_monitor
from elaunch.launcher.cli import main
from elaunch.rendezvous.rules import pace
wait_shares.LOOKS, pace.CONFIRM_S, link._LOOK_S = 30, 2.0, 0.1
observers._COUNT_EVERY_S, slow_monitor._SPAN_S = 0.05, 0.1
sys.argv = ["elaunch", *sys.argv[4:]]
main()
"""


def test_of_two_nodes_the_one_that_the_other_waits_for_is_named_on_both_with_the_cause(
    tmp_path: Path, torch_start: SharedStart
) -> None:
    (port,) = free_ports(1)
    script(tmp_path, PROGRAM)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    options += torch_start.options
    env = {**torch_start.env, "ELAUNCH_TOKEN": "0123456789abcdef0123456789abcdef"}
    jobs = {}
    prefix = (sys.executable, "-c", QUICK)
    with (
        Job(tmp_path, *options, "--log-dir", "a", "train.py", env=env, prefix=prefix) as one,
        Job(tmp_path, *options, "--log-dir", "b", "train.py", env=env, prefix=prefix) as other,
    ):
        jobs = {"a": one, "b": other}
        for job in jobs.values():
            job.wait_for_output("is slower than the ranks of the other nodes")
        (tmp_path / "end").touch()
        assert [job.wait() for job in jobs.values()] == [0, 0], one.output + other.output

    seen = (
        r"elaunch: rank 1 on \S+ is slower than the ranks of the other nodes: those wait in collectives for (\d+)% of"
        r" the time or more, and it for (\d+)%; (.+)"
    )
    said = {folder: re.findall(seen, job.stderr) for folder, job in jobs.items()}
    assert [len(found) for found in said.values()] == [1, 1], one.output + other.output
    events = {
        folder: [json.loads(line) for line in path.read_text().splitlines() if '"slow"' in line]
        for folder in jobs
        for path in (tmp_path / folder).glob("*_*/timeline.jsonl")
    }
    (named,) = (folder for folder, found in events.items() if found)
    (other_node,) = jobs.keys() - {named}
    assert said[other_node][0][2] == "the log of that node says what differs there"
    others, waits, cause = said[named][0]
    assert int(others) >= int(waits) + 15
    (event,) = events[named]
    check_event(event)
    assert (event["rank"], event["among"], event["is_whole_node"]) == (1, "nodes", False)
    assert event["wait_percent"] == int(others)
    assert event["text"].endswith(cause)
    assert bool(event["causes"]) != ("it may have more work" in cause)
