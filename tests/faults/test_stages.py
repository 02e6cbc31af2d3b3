"""The Keeper with ranks that have different parameters: the stages of a pipeline, with plain tensors."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import Ended, RankForker, Ranks

PROGRAM = Path(__file__).with_name("stages.py")
STEPS = 16


@pytest.fixture
def memory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def generation(
    forker: RankForker, folder: Path, memory: str, number: int, workers: int, steps: int = STEPS, **more: str
) -> list[Ended]:
    env = {"ELAUNCH_GENERATION": str(number), "ELAUNCH_MEMORY": memory, **more}
    with Ranks(forker, workers, PROGRAM, str(folder), str(steps), env=env) as ranks:
        return ranks.end()


def assert_done(ended: list[Ended], began: int) -> None:
    assert [rank.code for rank in ended] == [0] * len(ended), "\n".join(rank.err for rank in ended)
    assert [rank.notes[0] for rank in ended] == [{"began": began}] * len(ended)
    assert [rank.answer["same"] for rank in ended] == [True] * len(ended)


def test_each_stage_comes_back_with_its_own_parameters_from_4_to_2_to_4_ranks(
    forker: RankForker, tmp_path: Path, memory: str
) -> None:
    for name in ("die-0-7-3", "die-1-12-0"):
        (tmp_path / name).touch()

    first = generation(forker, tmp_path, memory, 0, 4)
    second = generation(forker, tmp_path, memory, 1, 2)
    third = generation(forker, tmp_path, memory, 2, 4)

    assert (first[3].code, second[0].code) == (-signal.SIGKILL, -signal.SIGKILL)
    # The other replica of the killed rank's stage may have kept step 7.
    assert [rank.notes[0] for rank in second] in ([{"began": 6}] * 2, [{"began": 7}] * 2)
    # No step is lost.
    assert_done(third, began=11)
