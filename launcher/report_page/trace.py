"""The run as a trace for Perfetto and chrome://tracing: JSON in Chrome's trace event format (pure).

Processes are nodes, threads are local ranks, slices are what they did. Thread 0 of a node is its agent, which has the
job's stages. https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaunch.launcher.report_page.goodput import Goodput
from elaunch.launcher.report_page.history import History
from elaunch.launcher.report_page.lanes import MarkKind, every_lane, lane_facts
from elaunch.launcher.report_page.node_log import NodeLog

_AGENT = 0
# Events of an agent that are moments worth to see; stages of processes are slices already.
_MOMENTS = (
    *("failed", "restarting", "gave_up", "hung", "stopping", "killing", "store_away", "store_back", "signalled"),
    *("seems_hung", "goes_on", "slow"),
    *("node_lost", "node_left", "node_joined", "cleared", "sealed", "ended"),
)
_MARKS = {MarkKind.CAUSE: "failure", MarkKind.FOLLOWER: "failure", MarkKind.WARNING: "warning"}


def trace(history: History, found: Goodput) -> dict[str, object]:
    """The trace, as the JSON object form of the format. Times are microseconds from the start of the job."""
    events: list[dict[str, object]] = []
    facts = lane_facts(history, found)
    for pid, node in enumerate(history.nodes, 1):
        events += _named(pid, node)
        events += _moments(pid, node)
        events += _steps(pid, node)
        for tid, lane in enumerate(every_lane(facts, node), 1):
            events.append(_metadata("thread_name", pid, tid, lane.name))
            for bar in lane.bars:
                args = {"generation": bar.generation, "note": bar.note}
                events.append(_slice(bar.doing.value, pid, tid, bar.begin_s, bar.end_s, args))
            for mark in lane.marks:
                events.append(_instant(_MARKS[mark.kind], pid, tid, mark.at_s, {"what": mark.note}, scope="t"))
    for part in found.parts:
        events.append(_slice(part.stage.words, 1, _AGENT, part.begin_s, part.end_s, {"generation": part.generation}))
    other = {"run_id": history.run_id, "began_at": history.began_at, "command": history.command}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _named(pid: int, node: NodeLog) -> Iterator[dict[str, object]]:
    yield _metadata("process_name", pid, _AGENT, node.name)
    yield {**_metadata("process_sort_index", pid, _AGENT, ""), "args": {"sort_index": pid}}
    yield _metadata("thread_name", pid, _AGENT, "the job" if pid == 1 else "agent")


def _moments(pid: int, node: NodeLog) -> Iterator[dict[str, object]]:
    for at_s, event in node.events:
        if event.event in _MOMENTS:
            what = event.text("sentence") or event.text("reason") or event.text("cause") or event.text("signal")
            what = what or event.text("message")
            args = {"generation": event.generation, "what": what[:500]}
            yield _instant(event.event, pid, _AGENT, at_s, args, scope="p")


def _steps(pid: int, node: NodeLog) -> Iterator[dict[str, object]]:
    for visit in node.visits:
        for progress in visit.progress:
            at = _us(progress.at_s)
            yield {"name": "step", "ph": "C", "pid": pid, "ts": at, "args": {"step": progress.step}}


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": value}}


def _slice(name: str, pid: int, tid: int, begin_s: float, end_s: float, args: object) -> dict[str, object]:
    # Both ends are rounded, so that neighbours touch and do not overlap.
    begin = _us(begin_s)
    common = {"name": name, "cat": "elaunch", "ph": "X", "pid": pid, "tid": tid}
    return {**common, "ts": begin, "dur": _us(end_s) - begin, "args": args}


def _instant(name: str, pid: int, tid: int, at_s: float, args: object, *, scope: str) -> dict[str, object]:
    return {
        "name": name,
        "cat": "elaunch",
        "ph": "i",
        "s": scope,
        "pid": pid,
        "tid": tid,
        "ts": _us(at_s),
        "args": args,
    }


def _us(seconds: float) -> int:
    return max(round(seconds * 1e6), 0)
