"""A job's answer becomes the exception that fits."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from elaunch import ChildFailedError, JobFailed
from elaunch.launcher.functions.launch import check

FAILURE = {
    "kind": "exception",
    "sentence": "rank 1 (local rank 1 on host, pid 9) raised ValueError: no in generation 0",
    "message": "raised ValueError: no",
    "host": "host",
    "failed_at": 5.5,
    "rank": 1,
    "local_rank": 1,
    "pid": 9,
    "code": 1,
    "traceback": "Traceback (most recent call last):\nValueError: no\n",
}


def failed(**fields: Any) -> ChildFailedError:
    told = {"outcome": "failed", "exit_code": 1, "text": "train FAILED", "failure": {**FAILURE, **fields}}
    with pytest.raises(ChildFailedError) as raised:
        check(told, 1, "train")
    return raised.value


def test_a_failed_rank_has_its_traceback() -> None:
    error = failed()

    rank, failure = error.get_first_failure()
    assert (rank, failure.local_rank, failure.pid, failure.exitcode) == (1, 1, 9, 1)
    assert failure.message["extraInfo"]["py_callstack"] == FAILURE["traceback"]
    assert (str(error), error.name, error.exit_code) == ("train FAILED", "train", 1)


def test_it_is_found_by_an_except_that_was_written_for_torch() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError as Torchs

    assert isinstance(failed(), Torchs)


def test_it_goes_through_a_pickle() -> None:
    error = failed(traceback="")

    copy = pickle.loads(pickle.dumps(error))

    assert str(copy) == str(error)
    assert copy.failures == error.failures
    assert copy.failures[1].message == "raised ValueError: no"


@pytest.mark.parametrize("outcome", ["interrupted", "refused", "unknown"])
def test_a_job_that_no_rank_failed_is_no_failure_of_a_rank(outcome: str) -> None:
    with pytest.raises(JobFailed, match=r"^elaunch: stopped$") as raised:
        check({"outcome": outcome, "exit_code": 143, "text": "elaunch: stopped\n", "failure": FAILURE}, 143, "train")

    assert type(raised.value) is JobFailed
    assert raised.value.exit_code == 143


@pytest.mark.parametrize(("code", "words"), [(-9, "was ended by SIGKILL"), (1, "ended with exit code 1")])
def test_a_job_that_could_not_answer_is_said_so(code: int, words: str) -> None:
    with pytest.raises(JobFailed, match=f"elaunch {words} before the outcome of train was known"):
        check({}, code, "train")
