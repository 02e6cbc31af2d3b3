"""Which variables may be others than they were when a fork server imported."""

from __future__ import annotations

import pytest

from elaunch.agent.forkserver.warm.variables import Read, of_no_use, read_before

THEN = {"HOME": "/home/a", "OMP_NUM_THREADS": "2", "LR": "0.1", "TQDM_MININTERVAL": "1"}


def why(then: dict[str, str], now: dict[str, str], *, has_tqdm: bool = False) -> str:
    return read_before(then, now, read(has_tqdm=has_tqdm))


def read(*, has_tqdm: bool = False) -> Read:
    return Read({"HF_HOME"}, {"SOME_LIBRARY", "NCCL_DEBUG"}, "import os; _ = os.getenv('COV')", has_tqdm)


@pytest.mark.parametrize(
    "name",
    [
        *("LR", "WANDB_MODE", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "PWD", "RANK", "ELAUNCH_MARKER"),
        *("TQDM_MININTERVAL", "_"),
        # Parts of words in a .pth file.
        *("CO", "env"),
    ],
)
def test_what_nobody_has_read_may_change_or_be_new(name: str) -> None:
    assert why(THEN, {**THEN, name: "other"}) == ""
    assert why({**THEN, name: "other"}, THEN) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("HF_HOME", "which was read while importing"),
        ("PYTHONHASHSEED", "which is read when a program starts"),
        ("LD_PRELOAD", "which is read when a program starts"),
        ("LC_ALL", "which is read when a program starts"),
        ("SOME_LIBRARY", "which a loaded library may have read"),
        ("COV", "which is in a .pth file"),
    ],
)
def test_what_may_have_been_read_is_named_without_its_value(name: str, reason: str) -> None:
    assert why(THEN, {**THEN, name: "a secret"}) == f"{name} is set, and was not, {reason}"
    assert why({**THEN, name: "a secret"}, THEN) == f"{name} is not set any more, {reason}"
    assert why({**THEN, name: "a secret"}, {**THEN, name: "new"}) == f"{name} has another value, {reason}"


def test_tqdm_looks_for_all_of_its_own() -> None:
    assert why(THEN, {**THEN, "TQDM_DISABLE": "1"}, has_tqdm=True).startswith("TQDM_DISABLE is set")


def test_only_what_nothing_can_have_read_is_of_no_use_to_a_fork_server() -> None:
    used = {"HF_HOME", "HOME", "LD_PRELOAD", "COV", "SOME_LIBRARY", "NCCL_DEBUG", "PATH", "RANK", "SLURM_JOB_ID"}

    assert of_no_use({*used, "AWS_SECRET_ACCESS_KEY", "LR"}, read()) == {"AWS_SECRET_ACCESS_KEY", "LR"}
    assert of_no_use({"TQDM_DISABLE"}, read()) == {"TQDM_DISABLE"}
    assert of_no_use({"TQDM_DISABLE"}, read(has_tqdm=True)) == set()
