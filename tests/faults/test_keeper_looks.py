"""Real ranks that look whether to stop after few of their steps, all of them after the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("looking.py")
# The step in which one rank is asked to stop.
LAST = 75


@pytest.fixture(scope="module")
def answers(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What both ranks say of two trainings that take turns."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        env = {"ELAUNCH_MEMORY": memory, "ELAUNCH_GENERATION": "0"}
        with Ranks(forker, 2, SCRIPT, str(tmp_path_factory.mktemp("looks")), env=env) as ranks:
            return ranks.answers()


def test_all_ranks_stop_after_the_same_step_at_the_look_after_the_request(answers: list[Any]) -> None:
    assert answers[0]["parts"] == answers[1]["parts"]
    first, second = answers[0]["parts"]
    assert answers[0]["code"] == 143
    # Both Keepers have the signal. The first look after the request, of either, stops both trainings.
    assert LAST <= second["step"] <= first["step"] <= second["step"] + 1
    assert [step for part in (first, second) for step in part["looks"] if step >= LAST] == [second["step"]]


def test_most_steps_have_no_look(answers: list[Any]) -> None:
    _, second = answers[0]["parts"]

    assert second["looks"][:2] == [0, 1]
    assert len(second["looks"]) < second["step"] / 2


def test_checkpoints_and_snapshots_are_made_after_the_steps_that_were_asked_for(answers: list[Any]) -> None:
    first, _ = answers[0]["parts"]

    assert {16, 32, 48, 64} <= set(first["looks"])
    assert [step for step in first["snapshots"] if step < LAST] == [1, 21, 41, 61]
    # Rank 0 has written them. The first loop ended after step 64.
    assert answers[0]["marks"] == [48, 64, first["step"]]
