"""A hook whose collectives may start late runs for one bucket after the other."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from elaunch.trainer.ddp.in_order import InOrder


class Bucket:
    def __init__(self, number: int) -> None:
        self.number = number

    def index(self) -> int:
        return self.number


class Slow:
    """A hook whose buckets are done when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.done: dict[int, torch.futures.Future[Any]] = {}

    def hook(self, state: object, bucket: Bucket) -> torch.futures.Future[Any]:
        self.begun.append(bucket.number)
        self.done[bucket.number] = torch.futures.Future()
        return self.done[bucket.number]


@pytest.fixture
def slow() -> Slow:
    return Slow()


def test_a_bucket_begins_when_the_one_before_it_is_done(slow: Slow) -> None:
    hook: Any = InOrder(slow.hook).hook
    results = [hook(None, Bucket(number)) for number in range(3)]
    assert slow.begun == [0]

    slow.done[0].set_result(torch.tensor(10))
    assert slow.begun == [0, 1]
    assert results[0].value() == 10
    assert not results[1].done()
    slow.done[1].set_result(torch.tensor(11))
    slow.done[2].set_result(torch.tensor(12))

    assert [int(result.value()) for result in results] == [10, 11, 12]


def test_if_an_exchange_fails_the_later_buckets_fail_with_it_and_do_not_begin(slow: Slow) -> None:
    hook: Any = InOrder(slow.hook).hook
    results = [hook(None, Bucket(number)) for number in range(3)]

    slow.done[0].set_exception(RuntimeError("connection closed by peer"))

    assert slow.begun == [0]
    for result in results:
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            result.wait()


def test_a_hook_that_raises_in_a_later_bucket_fails_that_bucket(slow: Slow) -> None:
    def broken(state: object, bucket: Bucket) -> torch.futures.Future[Any]:
        if bucket.number:
            raise ValueError("no such bucket")
        return slow.hook(state, bucket)

    hook: Any = InOrder(broken).hook
    _, second = (hook(None, Bucket(number)) for number in range(2))
    slow.done[0].set_result(torch.tensor(0))

    with pytest.raises(RuntimeError, match="ValueError: no such bucket"):
        second.wait()


def test_the_next_step_begins_although_the_last_one_has_failed(slow: Slow) -> None:
    hook: Any = InOrder(slow.hook).hook
    hook(None, Bucket(0))
    slow.done[0].set_exception(RuntimeError("lost"))

    result = hook(None, Bucket(0))
    slow.done[0].set_result(torch.tensor(1))

    assert result.value() == 1


def test_it_has_the_name_and_the_parameters_for_which_ddp_asks(slow: Slow) -> None:
    hook = InOrder(slow.hook).hook

    assert hook.__qualname__ == "Slow.hook"
    assert inspect.signature(hook).parameters["bucket"].annotation is torch.distributed.GradBucket
