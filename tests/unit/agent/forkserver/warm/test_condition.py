"""What a process cannot take over from another one must be equal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elaunch.agent.forkserver.warm.condition import Fact, condition, difference, jobs
from tests.harness import RUN_LIMIT_S

SHOW = (
    "from elaunch.agent.forkserver.warm.condition import condition\n"
    "for fact in condition(): print(repr(fact.what), repr(fact.value))"
)


def test_a_child_is_as_its_parent() -> None:
    said = subprocess.run(
        [sys.executable, "-c", SHOW], stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_LIMIT_S
    ).stdout

    assert said.splitlines() == [f"{fact.what!r} {fact.value!r}" for fact in condition()]


def test_what_differs_is_named_with_both_values() -> None:
    there = (Fact("the nice value", "0"), Fact("the cgroup", "0::/a"))

    assert difference(there, there) == ""
    assert difference(there, (there[0], Fact("the cgroup", "0::/b"))) == "the cgroup is 0::/b, and was 0::/a"
    assert difference(there, (*there, Fact("the root folder", ""))) == ""


def test_a_lower_priority_is_another_condition() -> None:
    lower = subprocess.run(
        ["nice", "-n", "3", sys.executable, "-c", SHOW],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=RUN_LIMIT_S,
    ).stdout

    assert f"'the nice value' '{min(os.nice(0) + 3, 19)}'" in lower


# set_mempolicy(2) to prefer node 0, by its number; ioprio_set(2) to the idle class.
_NUMBERS = {"x86_64": (238, 251), "aarch64": (237, 30)}


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (
            "syscall({0}, 1, ctypes.byref(ctypes.c_ulong(1)), ctypes.c_ulong(64))",
            "'the NUMA policy (numactl)' '1 of 0'",
        ),
        ("syscall({1}, 1, 0, 3 << 13)", "'the priority of its input and output (ionice)' '24576'"),
        ("prctl(41, 1, 0, 0, 0)", "'THP_enabled in /proc/self/status' '0'"),
    ],
)
def test_what_a_child_inherits_from_a_wrapper_is_another_condition(call: str, shown: str) -> None:
    code = f"import ctypes\nprint(ctypes.CDLL(None).{call.format(*_NUMBERS[os.uname().machine])})\n{SHOW}"
    said = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_LIMIT_S
    ).stdout

    if said.startswith("-1"):
        pytest.skip("the kernel has no such setting, or forbids it")
    assert shown in said
    assert shown not in "\n".join(f"{fact.what!r} {fact.value!r}" for fact in condition())


def test_another_job_of_a_scheduler_is_another_job() -> None:
    assert difference(jobs({}), jobs({"SLURM_JOB_ID": "7"})) == "SLURM_JOB_ID (a scheduler's job) is 7, and was not set"
