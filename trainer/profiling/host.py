"""Where the host's time goes while its GPU has nothing to do (pure).

A *range* is a span of the trace that some thread of the host was in: an annotation, as that of an optimizer's step, or
an operator. Only the outermost of each thread counts, so the ranges of a thread never overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from elaunch.trainer.profiling.intervals import Span, clip, length, minus, union

# A range: its thread, its name, and its span.
Range = tuple[str, str, Span]
# What no operator of the trace covers: Python's own code, and all that reads data without torch.
OUTSIDE = "Python outside of operators"
_BACKWARD = "autograd::engine::evaluate_function"
# A long list says nothing new.
NAMES_MAX = 8


def idle_spans(steps: Iterable[Span], busy: Sequence[Span]) -> list[Span]:
    """The parts of the steps in which the GPU neither computes nor exchanges; `busy` is a union."""
    return minus(union(steps), busy)


def host_times(ranges: Iterable[Range], idle: Sequence[Span]) -> dict[str, int]:
    """The ns of `idle`, a union, by what the host was in: the longest first. Threads may be in two at one time."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for name, span in _outermost(ranges):
        by_name["backward pass" if name.startswith(_BACKWARD) else name].append(span)
    found = {name: _within(spans, idle) for name, spans in by_name.items()}
    found[OUTSIDE] = length(minus(idle, union(span for spans in by_name.values() for span in spans)))
    longest = sorted((item for item in found.items() if item[1]), key=lambda item: (-item[1], item[0]))
    return dict(longest[:NAMES_MAX])


def _outermost(ranges: Iterable[Range]) -> Iterable[tuple[str, Span]]:
    ends: dict[str, int] = {}
    for thread, name, (begin, end) in sorted(ranges, key=lambda each: (each[2][0], -each[2][1])):
        if begin >= ends.get(thread, begin):
            ends[thread] = end
            yield name, (begin, end)


def _within(spans: Iterable[Span], idle: Sequence[Span]) -> int:
    return sum(length(clip(idle, begin, end)) for begin, end in union(spans))
