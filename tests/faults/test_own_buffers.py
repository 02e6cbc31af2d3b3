"""Buffers that each rank has for itself come back to that rank, also from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("own_buffers.py")


def trained(forker: RankForker, checkpoints: Path, steps: int, workers: int = 2) -> list[Any]:
    with Ranks(forker, workers, SCRIPT, str(checkpoints), str(steps)) as ranks:
        ended = ranks.end()
    assert [rank.code for rank in ended] == [0] * workers, ended
    return [rank.answer for rank in ended]


def test_each_rank_has_its_own_buffers_from_a_checkpoint_and_others_have_the_first_ones(
    tmp_path: Path, forker: RankForker
) -> None:
    calm = trained(forker, tmp_path / "calm", 6)
    halfway = trained(forker, tmp_path / "c", 3)

    again = trained(forker, tmp_path / "c", 6)

    assert again == calm
    assert calm[0]["center"] != calm[1]["center"]
    assert halfway[0] != calm[0]
    # It has no step to do.
    assert trained(forker, tmp_path / "c", 6, workers=3) == [calm[0]] * 3
