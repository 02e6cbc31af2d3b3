"""Spans of time and what they cover together (pure). A span is (begin, end) in whole nanoseconds, the end excluded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The spans without overlap, in order; those that touch are one."""
    merged: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def clip(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The parts of a union between `begin` and `end`."""
    # The span before the first that begins later may reach into the window.
    first = max(bisect_right(spans, (begin, begin)) - 1, 0)
    found = []
    for span_begin, span_end in spans[first:]:
        if span_begin >= end:
            break
        if span_end > begin:
            found.append((max(span_begin, begin), min(span_end, end)))
    return found


def minus(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts of a union that no span of the union `others` covers."""
    left = []
    for begin, end in spans:
        for other_begin, other_end in clip(others, begin, end):
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = other_end
        if begin < end:
            left.append((begin, end))
    return left


def length(spans: Iterable[Span]) -> int:
    """The sum of the spans' lengths."""
    return sum(end - begin for begin, end in spans)
