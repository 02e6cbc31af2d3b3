"""bench.state and the promises about the training's state: pure parts."""

from __future__ import annotations

import pytest

from bench import state
from bench.stamps import Stamp
from bench.state import Resumed, resumed

RANKS = 2


def steps(generation: int, first: int, last: int, at_s: float, step_s: float = 1.0) -> list[Stamp]:
    """Both ranks make these steps, one after the other; the second rank begins and ends a bit later."""
    return [
        Stamp(generation, event, at_s + (step - first + place) * step_s + 0.125 * rank, rank, step=step)
        for step in range(first, last + 1)
        for event, place in (("begun", 0.0), ("done", 0.75))
        for rank in range(RANKS)
    ]


def births(generation: int, restored: int, at_s: float, pids: tuple[int, int]) -> list[Stamp]:
    return [
        Stamp(generation, event, at_s + later_s, rank, pids[rank], restored if event == "restored" else -1)
        for event, later_s in (("script", 0.0), ("torch", 0.1), ("group", 0.2), ("restored", 0.3))
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize(
    ("restored", "expected"),
    [
        (7, Resumed(lost=0, next_step=8)),
        (5, Resumed(lost=2, next_step=8)),
        # Killed before it could mark the step that was kept.
        (8, Resumed(lost=0, next_step=9)),
    ],
)
def test_lost_is_what_any_rank_had_done_and_is_not_restored(restored: int, expected: Resumed) -> None:
    one_ahead = Stamp(0, "done", 18.0, 1, step=7)
    seen = [*steps(0, 1, 6, at_s=10.0), one_ahead]

    assert resumed(seen, 1) is None
    seen += births(1, restored, 20.0, (1, 2))
    assert resumed(seen, 1) == expected


def test_what_the_keeper_costs_is_a_share_of_a_step_without_it() -> None:
    notes = state.read(
        '{"way": "pair", "values": {"kept": 0.101, "plain": 0.1, "kept_p95": 0.12, "plain_p95": 0.11}}\n'
        '{"way": "end", "values": {}}\n{"way": "cut'
    )

    (pair,) = state.pair_samples(10, notes)

    assert (pair.contender, pair.workers) == ("elaunch", 10)
    assert pair.values[state.COST] == pytest.approx(1.0)
