"""What process groups report of their collectives."""

from __future__ import annotations

import threading
from enum import Enum

import pytest
import torch
import torch.distributed as dist

from elaunch.trainer.keeper.guarded_state import GroupWatch
from elaunch.trainer.ranks.group_status import BrokenGroup, GroupStatus, require_reported_aborts
from tests.harness import wait_for

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class ErrorType(Enum):
    """torch's, which a build without NCCL has too; torch 2.6 has it not."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2


class Nccl:
    """A group with one backend that has a status, as ProcessGroupNCCL since torch 2.7."""

    group_name = "default_pg"
    _device_types = (torch.device("cuda"),)

    def __init__(self) -> None:
        self.status = ErrorType.SUCCESS

    def _get_backend(self, device: torch.device) -> Nccl:
        return self

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> ErrorType:
        return self.status


def test_a_failed_collective_is_reported_by_its_group_and_stops_a_commit() -> None:
    first, second = Nccl(), Nccl()
    second.group_name = "mesh_tp"
    status = GroupStatus(lambda: [first, second])
    status.require_clean("step 7 is not committed")

    second.status = ErrorType.TIMEOUT

    expected = r"step 7 is not committed: a collective took longer than .*\(TIMEOUT, group mesh_tp\)"
    with pytest.raises(BrokenGroup, match=expected):
        status.require_clean("step 7 is not committed")


def test_gloo_has_no_status_and_is_taken_for_clean(group: None) -> None:
    status = GroupStatus()

    assert not status.is_known
    assert status.error() == ""


def test_a_group_that_was_destroyed_is_not_clean(group: None) -> None:
    status = GroupStatus()

    dist.destroy_process_group()

    assert status.error() == "the default process group was destroyed or aborted"


@pytest.mark.parametrize(
    ("handling", "has_nccl", "is_known", "warns"),
    [(None, True, False, False), ("1", True, True, False), ("1", False, False, False), ("1", True, False, True)],
)
def test_a_setting_under_which_half_reduced_gradients_could_be_committed_is_reported(
    handling: str | None, has_nccl: bool, is_known: bool, warns: bool
) -> None:
    environ = {} if handling is None else {HANDLING: handling}

    assert bool(require_reported_aborts(environ, has_nccl=has_nccl, is_known=is_known)) == warns
    with pytest.raises(ValueError, match=r"is 2, and torch before 2\.7 does not report"):
        require_reported_aborts({HANDLING: "2"}, has_nccl=True, is_known=False)


def test_the_state_is_saved_when_a_group_fails_while_the_training_is_stuck() -> None:
    group, saved, logged = Nccl(), threading.Event(), list[str]()

    with GroupWatch(GroupStatus(lambda: [group]), saved.set, logged.append, warns=False, poll_s=0.01):
        assert not saved.wait(0.05)
        group.status = ErrorType.COMM_ERROR
        wait_for(saved.is_set, "the state to be saved")

    assert logged == [
        "a collective has failed, and this rank keeps its last complete step: NCCL reported an error (COMM_ERROR, "
        "group default_pg)"
    ]
