"""What `tune` logs, where it leaves a model as it is, and what it remembers. With real ranks: faults/test_tuning.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.tuning import SearchResult
from elaunch.trainer.tuning import found_in, keep, sentence_of, tune

RESULT = SearchResult(5.0, 0.472, 0.291, passes=43, spent_s=18.24, reason="it won")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_with_one_worker_nothing_is_tuned() -> None:
    logged: list[str] = []

    assert isinstance(tune(nn.Linear(1, 1), lambda _: None, say=logged.append), DistributedDataParallel)

    assert logged == ["nothing to tune: there is one worker"]


def test_a_model_that_measuring_would_change_is_refused() -> None:
    trains = nn.Linear(1, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, trains.parameters(), {"lr": 1.0})
    with pytest.raises(ValueError, match="optimizers run in the backward pass"):
        tune(trains, lambda _: None)


def test_the_sentence_has_the_gain_the_cost_and_the_place() -> None:
    assert sentence_of(RESULT, "stored in /c/f") == (
        "communication tuned in 43 passes (18.2 s): buckets of 5 MiB; a pass takes 291.0 ms, with DDP's default "
        "472.0 ms (1.62 times as fast); stored in /c/f"
    )
    same = SearchResult(None, 1.5, 1.5, passes=31, spent_s=50.0, reason="nothing was faster")
    assert sentence_of(same, "not stored: /c") == (
        "communication tuned in 31 passes (50.0 s): DDP's default buckets, nothing was faster; not stored: /c"
    )


def test_a_choice_is_found_for_its_number_of_workers_and_by_a_restart_for_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    assert found_in(file, 4) == (None, "")

    assert keep(file, RESULT, 4) == f"stored in {file}"

    assert found_in(file, 4)[0] == (5.0,)
    assert found_in(file, 2) == (None, "")
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    assert found_in(file, 2) == ((5.0,), "buckets of 5 MiB, as this run measured with 4 workers")


@pytest.mark.parametrize("size", [{}, [], "rm -rf", -5, 1e300])
def test_a_damaged_choice_is_named_and_measured_again(tmp_path: Path, size: Any) -> None:
    keep(tmp_path / "key", RESULT, 4)
    record = json.loads((tmp_path / "key").read_text())

    for text in (json.dumps({**record, "bucket_mb": size}), "", "[]", "[" * 100_000, '{"bucket_mb": 5}'):
        (tmp_path / "key").write_text(text)
        found, sentence = found_in(tmp_path / "key", 4)

        assert found is None
        assert "cannot be used" in sentence
