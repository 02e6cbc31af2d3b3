"""Roles: several agents of one job with a role each, and several roles on one node."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness import LIGHT, Job, free_ports, records, script

pytestmark = pytest.mark.usefixtures("without_torch")


# In its first generation the trainer with rank 1 among the trainers dies, when all have logged where they are.
PROGRAM = """
import json, os, signal, time
from pathlib import Path

names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "ELAUNCH_GENERATION")
print("place", json.dumps({name: os.environ[name] for name in names}), flush=True)
Path(f"logged-{os.environ['RANK']}").touch()
if (os.environ["ROLE_NAME"], os.environ["ROLE_RANK"], os.environ["ELAUNCH_GENERATION"]) == ("trainer", "1", "0"):
    while len(list(Path().glob("logged-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
while os.environ["ELAUNCH_GENERATION"] == "0":
    time.sleep(1)
"""


def places(*logged: dict[str, Any], generation: int) -> list[tuple[str, int, int]]:
    """The role, the rank in it and its size, of all ranks in their order."""
    found = [each for each in logged if each["ELAUNCH_GENERATION"] == str(generation)]
    found.sort(key=lambda each: int(each["RANK"]))
    assert [int(each["RANK"]) for each in found] == list(range(int(found[0]["WORLD_SIZE"])))
    return [(each["ROLE_NAME"], int(each["ROLE_RANK"]), int(each["ROLE_WORLD_SIZE"])) for each in found]


PS_AND_TRAINERS = [("ps", 0, 1), ("trainer", 0, 3), ("trainer", 1, 3), ("trainer", 2, 3)]


def test_agents_of_one_job_may_have_a_role_each(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)
    (port,) = free_ports(1)
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *LIGHT)
    env = {"HOME": str(tmp_path), "ELAUNCH_TOKEN": "0123456789abcdef0123456789abcdef"}
    roles = (("--role", "ps", "--nproc-per-node", "1"), ("--role", "trainer", "--nproc-per-node", "3"))

    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(tmp_path, *words, *role, "train.py", env=env)) for role in roles]
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].output + jobs[1].output

    for generation in (0, 1):
        # Which agent comes first is open.
        logged = [each for job in jobs for each in records(job, "place")]
        assert sorted(places(*logged, generation=generation)) == PS_AND_TRAINERS
    for job in jobs:
        assert re.search(
            r"generation 1: 4 workers on 2 nodes \((?:1 ps, 3 trainer|3 trainer, 1 ps); restart 1", job.stderr
        )
    assert {each["ROLE_NAME"] for each in records(jobs[0], "place")} == {"ps"}
