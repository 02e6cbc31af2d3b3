"""What `tune` says, and where it leaves a model as it is. With real ranks: tests/faults/test_tuning.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.tuning.search import SearchResult
from elaunch.trainer.tuning.settings import CommSettings
from elaunch.trainer.tuning.tune import sentence_of, tune

RESULT = SearchResult(
    CommSettings(5, 1), CommSettings(), 0.472, 0.291, passes=43, spent_s=18.24, reason="it won each turn"
)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_without_ddp_and_with_one_worker_nothing_is_tuned() -> None:
    said: list[str] = []

    assert tune(nn.Linear(1, 1), say=said.append).is_done
    own = tune(DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb=3), say=said.append)

    assert own.settings == CommSettings(3, 3)
    assert own.hook_state is None
    assert said == [
        "nothing to tune: the model is in no DistributedDataParallel",
        "nothing to tune: there is one worker",
    ]


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="fixed has bucket; its words are bucket_mb, first_bucket_mb"):
        tune(nn.Linear(1, 1), fixed=["bucket"])


def test_the_sentence_has_the_gain_the_cost_and_the_place() -> None:
    assert sentence_of(RESULT, Path("/c/f"), "") == (
        "communication tuned in 43 passes (18.2 s): buckets of 5 MiB; a pass takes 291 ms, with the program's own "
        "settings 472 ms (1.62 times as fast); kept in /c/f"
    )
    same = SearchResult(CommSettings(), CommSettings(), 1.5, 1.5, passes=31, spent_s=50.0, reason="nothing was faster")
    assert sentence_of(same, None, "/c: no space left on device") == (
        "communication tuned in 31 passes (50.0 s): buckets of 25 MiB as before, nothing was faster; not kept: /c: no "
        "space left on device"
    )


def test_settings_are_said_in_words() -> None:
    every = CommSettings(0.5, 0.5, bucket_view=True, hook="bf16")
    assert every.words == "buckets of 0.5 MiB, gradients as views of them, hook bf16"
