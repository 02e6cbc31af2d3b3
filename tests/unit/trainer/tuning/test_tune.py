"""What `tune` logs, where it leaves a model as it is, and what it remembers. With real ranks: faults/test_tuning.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.tuning.search import CommSettings, SearchResult
from elaunch.trainer.tuning.tune import Choices, sentence_of, tune

RESULT = SearchResult(CommSettings(5), CommSettings(), 0.472, 0.291, passes=43, spent_s=18.24, reason="it won")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_without_ddp_and_with_one_worker_nothing_is_tuned() -> None:
    logged: list[str] = []

    tune(nn.Linear(1, 1), lambda: None, say=logged.append)
    own = tune(DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb=3), lambda: None, say=logged.append)

    assert own.settings == CommSettings(3)
    assert own.hook_state is None
    assert logged == [
        "nothing to tune: the model is in no DistributedDataParallel",
        "nothing to tune: there is one worker",
    ]


def test_the_sentence_has_the_gain_the_cost_and_the_place() -> None:
    assert sentence_of(RESULT, "stored in /c/f") == (
        "communication tuned in 43 passes (18.2 s): buckets of 5 MiB; a pass takes 291.0 ms, with the program's own "
        "settings 472.0 ms (1.62 times as fast); stored in /c/f"
    )
    same = SearchResult(CommSettings(), CommSettings(), 1.5, 1.5, passes=31, spent_s=50.0, reason="nothing was faster")
    assert sentence_of(same, "not stored: /c") == (
        "communication tuned in 31 passes (50.0 s): DDP's default buckets as before, nothing was faster; not stored: /c"
    )
    assert str(CommSettings(0.5, bucket_view=True, hook="bf16")) == (
        "buckets of 0.5 MiB, gradients as views of them, hook bf16"
    )


def choices(folder: Path | None, world_size: int = 4, key: str = "key") -> Choices:
    return Choices(folder, key, world_size, ("bf16",))


def test_a_choice_is_found_for_its_key_and_number_of_workers_and_by_a_restart_for_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choices(tmp_path).found() == (None, "")

    assert choices(tmp_path).keep(RESULT) == f"stored in {tmp_path / 'key'}"

    assert choices(tmp_path).found()[0] == RESULT.settings
    assert choices(tmp_path, key="another").found() == (None, "")
    assert choices(tmp_path, world_size=2).found() == (None, "")
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    assert choices(tmp_path, 2).found() == (RESULT.settings, "buckets of 5 MiB, as this run measured with 4 workers")


def test_without_a_folder_it_is_in_the_users_cache_and_a_link_there_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    choices(None).keep(RESULT)
    file = tmp_path / "cache" / "elaunch" / "tuning" / "key"
    assert choices(None).found()[0] == RESULT.settings
    assert file.parent.stat().st_mode & 0o777 == 0o700

    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in choices(None).found()[1]

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    assert choices(None).found() == (None, "")
    assert choices(None).keep(RESULT).startswith("not stored: neither HOME nor")
    (tmp_path / "file").touch()
    assert choices(tmp_path / "file").keep(RESULT).startswith("not stored: ")


@pytest.mark.parametrize("field", ["bucket_mb", "bucket_view", "hook", "other"])
@pytest.mark.parametrize("value", [{}, [], "rm -rf", -5, 1e300, "powersgd"])
def test_a_damaged_choice_is_named_and_measured_again(tmp_path: Path, field: str, value: Any) -> None:
    choices(tmp_path).keep(RESULT)
    record = json.loads((tmp_path / "key").read_text())
    record["settings"][field] = value
    (tmp_path / "key").write_text(json.dumps(record))

    found, sentence = choices(tmp_path).found()

    assert found is None
    assert "cannot be used" in sentence
    for text in ("", "{", "[]", "[" * 100_000, '{"settings": {}}'):
        (tmp_path / "key").write_text(text)
        assert "cannot be used" in choices(tmp_path).found()[1]
