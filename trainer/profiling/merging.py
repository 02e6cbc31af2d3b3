"""Joins the traces of all ranks into one file for Perfetto: a process for each rank, and one for each of its GPUs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaunch.trainer.profiling.traces import LEVEL

# Processes of rank r have the numbers from r × this on: the rank's own, then those of its devices.
_PER_RANK = 1000
# Ids of arrows between events are numbers of one process.
_ARROWS = 1 << 40


@dataclass(frozen=True)
class RankTrace:
    """The content of a rank's trace, and how far its clock is ahead of rank 0's."""

    rank: int
    host: str
    trace: Mapping[str, Any]
    ahead_ns: int = 0


def merged_events(one: RankTrace, begin_ns: int) -> Iterator[dict[str, Any]]:
    """A rank's events for the merged file. Times are microseconds after `begin_ns` on rank 0's clock."""
    base_ns = one.trace.get("baseTimeNanoseconds")
    shift_ns = (int(base_ns) if isinstance(base_ns, int | float) else 0) - one.ahead_ns - begin_ns
    processes = _processes(one)
    for number, name in processes.values():
        yield _about(number, "process_name", {"name": name})
        yield _about(number, "process_sort_index", {"sort_index": number})
    for event in one.trace.get("traceEvents", ()):
        if not isinstance(event, Mapping) or event.get("pid") not in processes:
            continue
        number, _ = processes[event["pid"]]
        if event.get("ph") == "M":
            if event.get("name") not in ("process_name", "process_labels", "process_sort_index"):
                yield {**event, "pid": number, "ts": 0}
            continue
        ts = event.get("ts")
        if not isinstance(ts, int | float):
            continue
        moved = {**event, "pid": number, "ts": (shift_ns + round(ts * 1000)) / 1000}
        if isinstance(event.get("id"), int):
            moved["id"] = one.rank * _ARROWS + event["id"]
        yield moved


def first_time(one: RankTrace) -> int:
    """When the first event of a trace began, on rank 0's clock, in ns."""
    base_ns = one.trace.get("baseTimeNanoseconds")
    times = (e.get("ts") for e in one.trace.get("traceEvents", ()) if isinstance(e, Mapping) and e.get("ph") == "X")
    first = min((ts for ts in times if isinstance(ts, int | float)), default=0)
    return (int(base_ns) if isinstance(base_ns, int | float) else 0) + round(first * 1000) - one.ahead_ns


def write_merged(path: Path, traces: Iterable[RankTrace]) -> None:
    """Write all traces into one file, one after the other, so that only one is in memory. Raises OSError.

    The file appears when it is whole. The first trace's begin is time 0.
    """
    partial = path.with_name(f".{path.name}.tmp")
    begin_ns: int | None = None
    try:
        with gzip.open(partial, "wt", compresslevel=LEVEL, encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            separator = "\n"
            for one in traces:
                begin_ns = first_time(one) if begin_ns is None else begin_ns
                for event in merged_events(one, begin_ns):
                    file.write(separator + json.dumps(event, separators=(",", ":")))
                    separator = ",\n"
            file.write("\n]}\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _about(pid: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": 0, "ts": 0, "args": args}


def _processes(one: RankTrace) -> dict[Any, tuple[int, str]]:
    """The processes of a trace: its own number in the merged file, and its name. The rank's own comes first.

    kineto calls a GPU a process too, with its number as the id; what is not a number is of its own making.
    """
    counts: dict[int, int] = {}
    on_device: set[int] = set()
    for event in one.trace.get("traceEvents", ()):
        pid = event.get("pid") if isinstance(event, Mapping) and event.get("ph") == "X" else None
        if isinstance(pid, int) and pid >= 0:
            counts[pid] = counts.get(pid, 0) + 1
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"):
                on_device.add(pid)
    where = f" on {one.host}" if one.host else ""
    named: dict[Any, tuple[int, str]] = {}
    for number, pid in enumerate(sorted(counts, key=lambda each: (each in on_device, -counts[each]))):
        what = f", GPU {pid}" if pid in on_device else "" if number == 0 else f", process {pid}"
        named[pid] = one.rank * _PER_RANK + number, f"rank {one.rank}{where}{what}"
    return named
