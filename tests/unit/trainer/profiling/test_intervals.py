"""profiling.intervals: what spans of time cover together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elaunch.trainer.profiling.intervals import Span, clip, length, minus, union

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def points(spans: list[Span]) -> set[int]:
    return {point for begin, end in spans for point in range(begin, end)}


def test_spans_that_overlap_or_touch_are_one() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 7)]


def test_what_others_cover_is_taken_away() -> None:
    assert minus([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert minus([(0, 10)], []) == [(0, 10)]
    assert length(minus([(0, 10), (20, 30)], [(8, 25)])) == 8 + 5


@given(SPANS, SPANS, st.integers(0, 60), st.integers(0, 60))
def test_they_are_sets_of_moments(one: list[Span], other: list[Span], begin: int, end: int) -> None:
    first, second = union(one), union(other)

    assert points(first) == points(one)
    assert length(first) == len(points(one))
    assert points(minus(first, second)) == points(one) - points(other)
    assert points(clip(first, begin, end)) == points(one) & set(range(begin, end))
