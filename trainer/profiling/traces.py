"""torch.profiler's traces: what a rank computed and communicated in each step, and all ranks' traces in one file.

Also the choice of steps, and the table of the results.

A trace is Chrome's JSON as kineto writes it. On a CPU, operators are computation and the events of the backend
(`gloo:all_reduce`) are communication. On a GPU its kernels are computation, and NCCL's are communication. A *span* is
a half-open (begin, end) in integer nanoseconds of the host's wall clock.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

JOINED = "trace.json.gz"

_STEP = re.compile(r"ProfilerStep#(\d+)")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Events of a backend that runs on CPUs: the time from its thread's first byte to its last.
_BACKENDS = ("gloo:", "mpi:", "ucc:")
# Operators that start a collective or wait for one.
_WAITS = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms", *_BACKENDS, "nccl:")
# torch.compile's code on CPUs has no operators; these annotations enclose it.
_COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region")
# Process ids of rank r begin at r × this: the rank's own, then those of its devices.
_PER_RANK = 1000
# Ids of flow events are unique only within a process.
_FLOWS = 1 << 40

Span = tuple[int, int]


@dataclass(frozen=True)
class StepTimes:
    """How one rank spent a step, in seconds. `exposed_s` is communication during which the rank computed nothing."""

    rank: int
    step: int
    seconds: float
    computation_s: float
    communication_s: float
    exposed_s: float


def parsed(content: bytes) -> Mapping[str, Any]:
    """The trace as a value. Raises ValueError: with a full disk kineto leaves a truncated file."""
    # A name in it may be any bytes.
    trace: Mapping[str, Any] = json.loads(content.decode(errors="replace"), strict=False)
    return trace


def step_times(trace: Mapping[str, Any], rank: int, first_step: int) -> tuple[list[StepTimes], bool]:
    """The rank's steps in order, the first of which is `first_step`, and whether the trace has GPU kernels.

    Raises ValueError if the trace has no whole step.
    """
    slices = _slices(trace)
    on_gpu = any(event.get("cat") in _ON_DEVICE for event in slices)
    # The profiler counts from the start of its warm-up; its first recorded step is ours.
    steps = sorted(
        (int(match[1]), *_span(event))
        for event in slices
        if event.get("cat") != "gpu_user_annotation" and (match := _STEP.fullmatch(str(event.get("name"))))
    )
    if not steps:
        raise ValueError("the trace has no whole step")
    computes, communicates = _on_gpu(slices) if on_gpu else _on_cpu(slices)
    exposed = minus(communicates, computes)
    found = []
    for number, begin, end in steps:
        parts = (length(clip(spans, begin, end)) / 1e9 for spans in (computes, communicates, exposed))
        found.append(StepTimes(rank, first_step + number - steps[0][0], (end - begin) / 1e9, *parts))
    return found, on_gpu


def _on_gpu(slices: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    kernels: dict[bool, list[Span]] = {True: [], False: []}
    for event in slices:
        if event.get("cat") in _ON_DEVICE:
            kernels[str(event.get("name")).startswith("nccl")].append(_span(event))
    return union(kernels[False]), union(kernels[True])


def _on_cpu(slices: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    operators: dict[str, list[Span]] = defaultdict(list)
    waits: dict[str, list[Span]] = defaultdict(list)
    communicates: list[Span] = []
    for event in slices:
        name, thread, span = str(event.get("name")), str(event.get("tid")), _span(event)
        if name.startswith(_BACKENDS):
            communicates.append(span)
        if name.startswith(_WAITS):
            waits[thread].append(span)
        elif event.get("cat") == "cpu_op" or name.startswith(_COMPILED):
            operators[thread].append(span)
    # An operator that encloses a wait computes only before and after it.
    computes = (minus(union(spans), union(waits[thread])) for thread, spans in operators.items())
    return union(span for spans in computes for span in spans), union(communicates)


def write_joined(path: Path, traces: Iterable[tuple[int, bytes]]) -> None:
    """Write the gzipped traces of all ranks, by rank, into one file. Raises OSError, EOFError or ValueError.

    Each rank is a process there, and so is each of its GPUs. Only one trace is in memory at a time. Times are those of
    the hosts' wall clocks; the first trace begins at 0. The file is written atomically.
    """
    partial = path.with_name(f".{path.name}.tmp")
    begin_ns: int | None = None
    try:
        with gzip.open(partial, "wt", compresslevel=6, encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            separator = "\n"
            for rank, content in traces:
                trace = parsed(gzip.decompress(content))
                slices = _slices(trace)
                base_ns = int(trace.get("baseTimeNanoseconds", 0))
                if begin_ns is None:
                    begin_ns = base_ns + min((_span(event)[0] for event in slices), default=0)
                for event in _joined_events(trace, rank, slices, base_ns - begin_ns):
                    file.write(separator + json.dumps(event, separators=(",", ":")))
                    separator = ",\n"
            file.write("\n]}\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _joined_events(
    trace: Mapping[str, Any], rank: int, slices: Sequence[Mapping[str, Any]], shift_ns: int
) -> Iterator[dict[str, Any]]:
    processes = _processes(rank, slices)
    for number, name in processes.values():
        yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "ts": 0, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "args": {"sort_index": number}}
    for event in trace.get("traceEvents", ()):
        if event.get("pid") not in processes:
            continue
        number, _ = processes[event["pid"]]
        if event.get("ph") == "M":
            if event.get("name") not in ("process_name", "process_labels", "process_sort_index"):
                yield {**event, "pid": number, "ts": 0}
        else:
            moved = {**event, "pid": number, "ts": (shift_ns + round(event["ts"] * 1000)) / 1000}
            if isinstance(event.get("id"), int):
                moved["id"] = rank * _FLOWS + event["id"]
            yield moved


def _processes(rank: int, slices: Sequence[Mapping[str, Any]]) -> dict[Any, tuple[int, str]]:
    """The processes of a trace: each one's number in the joined file, and its name. The rank's own comes first.

    kineto lists a GPU as a process too, with its number as the id; ids that are not integers are kineto's own.
    """
    on_device: dict[int, bool] = {}
    for event in slices:
        pid = event.get("pid")
        if isinstance(pid, int) and pid >= 0:
            on_device[pid] = on_device.get(pid, False) or event.get("cat") in (*_ON_DEVICE, "gpu_user_annotation")
    named: dict[Any, tuple[int, str]] = {}
    for number, pid in enumerate(sorted(on_device, key=lambda each: (on_device[each], each))):
        what = f", GPU {pid}" if on_device[pid] else "" if number == 0 else f", process {pid}"
        named[pid] = rank * _PER_RANK + number, f"rank {rank}{what}"
    return named


def _slices(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The complete events, which have a duration."""
    return [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]


def _span(event: Mapping[str, Any]) -> Span:
    # Microseconds with three decimals.
    begin_ns = round(event["ts"] * 1000)
    return begin_ns, begin_ns + round(event["dur"] * 1000)


def union(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, merged where they overlap or touch."""
    merged: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def clip(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The parts of a union between `begin` and `end`."""
    # The last span that begins before the window may reach into it.
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


# The version of profile.json. It grows when a field is removed or redefined.
SCHEMA = 3
# Steps that a count skips after each start: memory is allocated, DDP rebuilds its buckets, the compiler compiles. The
# profiler itself warms up in the last of them.
WARM_UP_STEPS = 2
# Rows of the table: the ranks that communicate least, for which the others wait.
_ROWS_MAX = 16
# A rank is named if the others waited for it for this share of a step.
_WAITED = 0.02


@dataclass(frozen=True)
class StepWindow:
    """Steps `first` to `last`, both included; the first step of a training is 1."""

    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"step {self.first}" if self.count == 1 else f"steps {self.first} to {self.last}"


def parse_steps(text: str) -> StepWindow | int:
    """`10-12` is a range of steps, `3` their number in each start. Raises ValueError with the reason."""
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})\s*)?", text)
    if not found:
        raise ValueError(f"{text!r} is neither a number of steps nor a range; give 3, or 10-12")
    first, last = int(found[1]), int(found[2] or 0)
    count = first if found[2] is None else last - first + 1
    if count < 1:
        raise ValueError(f"{text} is {count} steps; give at least one")
    if found[2] is None:
        return count
    if first < 2:
        raise ValueError(f"{text} begins with step {first}; the profiler warms up for one step, so begin with 2")
    return StepWindow(first, last)


def last_step_needed(choice: StepWindow | int) -> int:
    """The number of steps that a new training needs for the choice."""
    return choice.last if isinstance(choice, StepWindow) else WARM_UP_STEPS + choice


def window_of(choice: StepWindow | int, next_step: int) -> StepWindow | None:
    """The steps to profile in a start that begins with `next_step`: the rest of a range, None without any.

    The profiler warms up in the step before the first.
    """
    if isinstance(choice, int):
        return StepWindow(next_step + WARM_UP_STEPS, next_step + WARM_UP_STEPS + choice - 1)
    window = StepWindow(max(choice.first, next_step + 1), choice.last)
    return window if window.count > 0 else None


def table(times: Sequence[StepTimes]) -> list[str]:
    """The table: a summary, each rank's mean step, and the rank that the others waited for."""
    if not times:
        return []
    window = StepWindow(min(each.step for each in times), max(each.step for each in times))
    means = {rank: _mean([each for each in times if each.rank == rank]) for rank in sorted({t.rank for t in times})}
    of_all = _mean(times)
    covered = 1 - of_all["exposed_s"] / of_all["communication_s"] if of_all["communication_s"] else None
    overlap = "" if covered is None else f"; computation covered {covered:.0%} of the communication"
    lines = [f"{window} took {_time(of_all['seconds'])}{' each' * (window.count > 1)}{overlap}"]
    # In a collective the last rank to begin does not wait: it communicates least.
    shown = sorted(means, key=lambda rank: means[rank]["communication_s"])[:_ROWS_MAX]
    cells: list[tuple[str, ...]] = [("rank", "step", "computes", "communicates", "exposed")]
    cells += [(str(rank), *map(_time, means[rank].values())) for rank in sorted(shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    last = shown[0]
    waited_s = statistics.median(each["exposed_s"] for each in means.values()) - means[last]["exposed_s"]
    if len(means) > 1 and waited_s > _WAITED * of_all["seconds"]:
        lines.append(f"rank {last} kept the others waiting, for {_time(waited_s)} of each step")
    return lines


def record(times: Sequence[StepTimes], lines: Sequence[str], *, generation: int, on_gpu: bool) -> dict[str, Any]:
    """profile.json: seconds of each step on each rank."""
    of_all = _mean(times) if times else {}
    return {
        "schema": SCHEMA,
        "generation": generation,
        "first_step": min((each.step for each in times), default=0),
        "last_step": max((each.step for each in times), default=0),
        "sentences": list(lines),
        "step_s": of_all.get("seconds"),
        "gpu_busy": of_all["computation_s"] / of_all["seconds"] if of_all and on_gpu else None,
        "steps": [asdict(each) for each in times],
    }


def _mean(times: Sequence[StepTimes]) -> Mapping[str, float]:
    names = ("seconds", "computation_s", "communication_s", "exposed_s")
    return {name: sum(getattr(each, name) for each in times) / len(times) for name in names}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
