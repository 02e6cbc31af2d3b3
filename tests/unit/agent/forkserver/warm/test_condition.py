"""What a process cannot take over from another one must be equal."""

from __future__ import annotations

import os
import subprocess
import sys

from elaunch.agent.forkserver.warm.condition import Fact, condition, difference, jobs

SHOW = (
    "from elaunch.agent.forkserver.warm.condition import condition\n"
    "for fact in condition(): print(repr(fact.what), repr(fact.value))"
)


def test_a_child_is_as_its_parent() -> None:
    said = subprocess.run([sys.executable, "-c", SHOW], stdout=subprocess.PIPE, text=True, check=True).stdout

    assert said.splitlines() == [f"{fact.what!r} {fact.value!r}" for fact in condition()]


def test_what_differs_is_named_with_both_values() -> None:
    there = (Fact("the nice value", "0"), Fact("the cgroup", "0::/a"))

    assert difference(there, there) == ""
    assert difference(there, (there[0], Fact("the cgroup", "0::/b"))) == "the cgroup is 0::/b, and was 0::/a"
    assert difference(there, (*there, Fact("the root folder", ""))) == ""


def test_a_lower_priority_is_another_condition() -> None:
    lower = subprocess.run(
        ["nice", "-n", "3", sys.executable, "-c", SHOW], stdout=subprocess.PIPE, text=True, check=True
    ).stdout

    assert f"'the nice value' '{min(os.nice(0) + 3, 19)}'" in lower


def test_another_job_of_a_scheduler_is_another_job() -> None:
    assert difference(jobs({}), jobs({"SLURM_JOB_ID": "7"})) == "SLURM_JOB_ID (a scheduler's job) is 7, and was not set"
