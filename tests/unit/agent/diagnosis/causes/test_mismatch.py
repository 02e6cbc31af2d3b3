"""Nodes with other software, as an agent tells of it: a warning at the start, and the next step of a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Log
from elaunch.agent.core.events import WorkerExited
from elaunch.agent.core.state import Running
from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.driver import TWO, Driver, cleared, failure, settle

WORDS = "the nodes have different software: torch 2.12 on node-b; torch 2.13 on node-a"


def running(second: str) -> tuple[Driver, Driver]:
    one = Driver(TWO, slots=1, software="torch 2.13").begin()
    one.settle()
    other = Driver(TWO, store=one.store, host="node-b", slots=1, remote=True, software=second).begin()
    settle(one, other)
    return one, other


def test_both_nodes_say_it_once_as_a_warning_also_after_a_restart() -> None:
    one, other = running("torch 2.12")
    one.exits(0, 3)
    one.happen(cleared(0))
    settle(one, other)
    other.exits(0, -15)
    other.happen(cleared(0))
    settle(one, other)

    for driver in (one, other):
        assert isinstance(driver.agent.phase, Running)
        assert driver.agent.phase.table.generation == 1
        assert [say for say in driver.all_acted if isinstance(say, Log) and "software" in say.text] == [
            Log(WORDS, "warning")
        ]


@pytest.mark.parametrize(
    ("second", "exception", "message", "is_named"),
    [
        (
            "torch 2.12",
            "DistBackendError",
            "raised DistBackendError: NCCL error in: NCCLUtils.cpp, invalid usage",
            True,
        ),
        ("torch 2.12", "ValueError", "raised ValueError: the loss is NaN", False),
        (
            "torch 2.13",
            "DistBackendError",
            "raised DistBackendError: NCCL error in: NCCLUtils.cpp, invalid usage",
            False,
        ),
    ],
)
def test_it_is_the_next_step_of_a_failure_between_ranks_and_of_no_other(
    second: str, exception: str, message: str, is_named: bool
) -> None:
    one, _ = running(second)
    failed = replace(failure(0, 0, 1, FailureKind.EXCEPTION), message=message, exception=exception)

    one.happen(WorkerExited(0, 0, 1, failed))
    one.happen(cleared(0))

    assert one.agent.last_failure
    assert one.agent.last_failure.advice.startswith(WORDS) is is_named
