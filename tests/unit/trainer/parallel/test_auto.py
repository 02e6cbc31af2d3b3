"""The record of a choice: it is read as it was written, or named as damaged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.parallel.auto import KeptPlan
from elaunch.trainer.parallel.choice import StepMemory
from elaunch.trainer.parallel.estimate import WorkerSpeed

SPEED = WorkerSpeed(100, 1e9, 1e8, 1e-3, 2e-9, {"2": 1e-3})
RECORD = KeptPlan("dp=2,tp=2", 4, StepMemory(90, 100), SPEED, 1 << 30, [{"plan": "ddp", "needs": 5}])


def test_a_record_is_read_as_it_was_written() -> None:
    assert KeptPlan.read(RECORD.content) == RECORD


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 1},
        {"plan": "auto"},
        {"plan": "no plan"},
        {"plan": 5},
        {"world_size": 0},
        {"world_size": "4"},
        {"memory": {"estimated": 0, "measured": 1}},
        {"memory": {"estimated": 1, "measured": "1"}},
        {"memory": 1.0},
        {"worker": {"speed": 1}},
        {"worker": None},
        {"other": 1},
    ],
)
def test_what_is_no_record_is_named_as_damaged(changed: dict[str, object]) -> None:
    content = json.dumps({"format": 2, **asdict(RECORD), **changed}).encode()

    with pytest.raises(ValueError, match=r"it is (damaged|not of format 2)"):
        KeptPlan.read(content)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null"])
def test_damaged_bytes_are_no_record(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        KeptPlan.read(content)


def test_the_choice_is_kept_beside_checkpoints_that_are_elsewhere_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    elsewhere = str(tmp_path / "checkpoints")
    first, second = RunDirectory(tmp_path / "a", elsewhere), RunDirectory(tmp_path / "b", elsewhere)
    assert first.kept_plan() is None

    first.keep_plan(RECORD.content)

    # Another run directory goes on from the same checkpoints.
    assert first.kept_plan() == second.kept_plan() == RECORD.content
    assert not second.plan.exists()
    assert not first.has_checkpoints()
