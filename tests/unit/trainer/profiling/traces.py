"""Made-up traces of torch.profiler, whose answers are known by arithmetic. Times are milliseconds after BASE_NS."""

from __future__ import annotations

from typing import Any

from elaunch.trainer.profiling.activity import RankActivity, read_activity

BASE_NS = 1_700_000_000_000_000_000
MAIN, GLOO = 100, 200

Event = dict[str, Any]


def slice_of(name: str, begin_ms: float, end_ms: float, category: str, tid: int = MAIN, **args: object) -> Event:
    at = {"ts": begin_ms * 1000, "dur": (end_ms - begin_ms) * 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": 4711, "tid": tid, **at, "args": args}


def step(number: int, begin_ms: float, end_ms: float) -> Event:
    return slice_of(f"ProfilerStep#{number}", begin_ms, end_ms, "user_annotation")


def op(name: str, begin_ms: float, end_ms: float, tid: int = MAIN) -> Event:
    return slice_of(name, begin_ms, end_ms, "cpu_op", tid)


def gloo(begin_ms: float, end_ms: float, elements: int = 1000, name: str = "all_reduce") -> Event:
    shapes = {"Input Dims": [[elements]], "Input type": ["float"]}
    return slice_of(f"gloo:{name}", begin_ms, end_ms, "user_annotation", GLOO, **shapes)


def kernel(name: str, begin_ms: float, end_ms: float, **args: object) -> Event:
    return {**slice_of(name, begin_ms, end_ms, "kernel", 7, **args), "pid": 0}


def trace(*events: Event, **more: object) -> dict[str, Any]:
    return {"baseTimeNanoseconds": BASE_NS, "traceEvents": list(events), **more}


def activity(*events: Event, rank: int = 0, first_step: int = 10, **more: object) -> RankActivity:
    return read_activity(trace(*events, **more), rank, first_step=first_step)


def ns(ms: float) -> int:
    return round(ms * 1_000_000)
