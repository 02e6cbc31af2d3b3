"""What one rank did in the profiled steps, read from torch.profiler's trace (pure).

The trace is Chrome's JSON as kineto writes it. On a CPU, operators are computation and the events of the backend
(`gloo:all_reduce`) are communication. On a GPU its kernels are computation, and NCCL's are communication.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elaunch.trainer.profiling.host import Range, host_times, idle_spans
from elaunch.trainer.profiling.intervals import Span, union

_STEP = re.compile(r"ProfilerStep#(\d+)")
_ON_HOST = ("cpu_op", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Events of a backend that runs on CPUs: the time from its thread's first byte to its last.
_BACKENDS = ("gloo:", "mpi:", "ucc:")
# Operators that hand something to a backend or wait for it.
_HANDS_OVER = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms", *_BACKENDS, "nccl:")
# torch.compile's code on CPUs has no operators; these annotations are around it.
_COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region")
# A part of a NCCL kernel's name, as ncclDevKernel_AllReduce_Sum_f32_RING_LL, and the collective.
_KERNELS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send_recv",
}
_SPELLINGS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
}
_TYPE_BYTES = (
    *(("double", 8), ("long", 8), ("int64", 8), ("complex", 8), ("bfloat16", 2), ("half", 2), ("float16", 2)),
    *(("float8", 1), ("short", 2), ("int16", 2), ("char", 1), ("byte", 1), ("bool", 1), ("uint8", 1), ("int8", 1)),
    *(("float", 4), ("int", 4)),
)


@dataclass(frozen=True)
class RankCollective:
    """One collective of a rank: when it was under way there. `bytes` is 0, and `group` empty, if the trace lacks it."""

    kind: str
    begin_ns: int
    end_ns: int
    bytes: int = 0
    group: str = ""


@dataclass(frozen=True)
class ProfiledStep:
    """A step on one rank; `number` is the training's."""

    number: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankActivity:
    """A rank's steps, in order, its collectives, by their begin, and the union of the time in which it computed.

    Times are the wall clock of the rank's host, in ns. `trouble` says why nothing is known of the rank. `groups` is the
    number of process groups with more than one rank, 0 if it is not known. `host_ns` says what the host was in while
    its GPU had nothing to do, over all steps; it is empty without a GPU.
    """

    rank: int
    host: str = ""
    on_gpu: bool = False
    steps: tuple[ProfiledStep, ...] = ()
    collectives: tuple[RankCollective, ...] = ()
    computes: tuple[Span, ...] = ()
    groups: int = 0
    trouble: str = ""
    host_ns: Mapping[str, int] = field(default_factory=dict)


def read_activity(trace: Mapping[str, Any], rank: int, *, first_step: int, host: str = "") -> RankActivity:
    """The activity in a trace whose first profiled step is `first_step`. Raises ValueError if it has no whole step."""
    base_ns = _whole(trace.get("baseTimeNanoseconds"))
    slices = [event for event in trace.get("traceEvents", ()) if _is_slice(event)]
    on_gpu = any(event.get("cat") in _ON_DEVICE for event in slices)
    steps = _steps(slices, base_ns, first_step)
    if not steps:
        raise ValueError("the trace has no whole step")
    within = steps[0].begin_ns, steps[-1].end_ns
    found = _on_gpu(slices, base_ns) if on_gpu else _on_cpu(slices, base_ns)
    collectives, computes = [], []
    for begin_ns, end_ns, each in found:
        if end_ns <= within[0] or begin_ns >= within[1]:
            continue
        if each is None:
            computes.append((begin_ns, end_ns))
        else:
            collectives.append(each)
    busy = union([*computes, *((each.begin_ns, each.end_ns) for each in collectives)])
    idle = idle_spans(((each.begin_ns, each.end_ns) for each in steps), busy)
    return RankActivity(
        rank,
        host,
        on_gpu,
        steps,
        tuple(sorted(collectives, key=lambda each: (each.begin_ns, each.end_ns))),
        tuple(union(computes)),
        _groups(trace),
        host_ns=host_times(_ranges(slices, base_ns), idle) if on_gpu else {},
    )


Found = tuple[int, int, "RankCollective | None"]


def _steps(slices: Iterable[Mapping[str, Any]], base_ns: int, first_step: int) -> tuple[ProfiledStep, ...]:
    """The steps in order. The profiler counts from the start of its warm-up; the first that it recorded is ours."""
    found = sorted(
        (int(match[1]), *_span(event, base_ns))
        for event in slices
        if event.get("cat") != "gpu_user_annotation" and (match := _STEP.fullmatch(str(event.get("name"))))
    )
    return tuple(ProfiledStep(first_step + n - found[0][0], begin, end) for n, begin, end in found)


def _ranges(slices: Iterable[Mapping[str, Any]], base_ns: int) -> Iterator[Range]:
    for event in slices:
        name = str(event.get("name"))
        if event.get("cat") in _ON_HOST and not _STEP.fullmatch(name):
            yield str(event.get("tid")), name, _span(event, base_ns)


def _on_gpu(slices: Iterable[Mapping[str, Any]], base_ns: int) -> Iterator[Found]:
    for event in slices:
        if event.get("cat") not in _ON_DEVICE:
            continue
        name, (begin_ns, end_ns) = str(event.get("name")), _span(event, base_ns)
        if not name.startswith("nccl"):
            yield begin_ns, end_ns, None
            continue
        args = _args(event)
        kind = _spelling(str(args.get("Collective name") or "")) or next(
            (kind for part, kind in _KERNELS.items() if f"_{part}" in name), "communication"
        )
        elements = max(_whole(args.get("In msg nelems")), _whole(args.get("Out msg nelems")))
        group = str(args.get("Process Group Ranks") or args.get("Process Group Name") or "")
        size = elements * _type_bytes(str(args.get("dtype", "")))
        yield begin_ns, end_ns, RankCollective(kind, begin_ns, end_ns, size, group)


def _on_cpu(slices: Iterable[Mapping[str, Any]], base_ns: int) -> Iterator[Found]:
    by_thread: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for event in slices:
        name, category = str(event.get("name")), event.get("cat")
        begin_ns, end_ns = _span(event, base_ns)
        backend = next((each for each in _BACKENDS if name.startswith(each)), "")
        if backend:
            kind = _spelling(name.removeprefix(backend))
            yield begin_ns, end_ns, RankCollective(kind, begin_ns, end_ns, _input_bytes(_args(event)))
        if category == "cpu_op" or backend or name.startswith(_COMPILED):
            by_thread[str(event.get("tid"))].append((begin_ns, -end_ns, name))
    for operators in by_thread.values():
        yield from _computations(sorted(operators))


def _computations(operators: Sequence[tuple[int, int, str]]) -> Iterator[Found]:
    """The operators of a thread that compute; a wrapper of one that waits for other ranks is none.

    They come by their begin, the longer one first: (begin, minus end, name).
    """
    # The operators around the present one; the last entry of each says whether it only computes.
    around: list[list[Any]] = []
    for begin_ns, minus_end_ns, name in operators:
        while around and around[-1][1] <= begin_ns:
            inner = around.pop()
            if inner[2]:
                yield inner[0], inner[1], None
        waits = name.startswith(_HANDS_OVER)
        if waits:
            for each in around:
                each[2] = False
        around.append([begin_ns, -minus_end_ns, not waits])
    for inner in around:
        if inner[2]:
            yield inner[0], inner[1], None


def _groups(trace: Mapping[str, Any]) -> int:
    info = trace.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    if isinstance(groups, Mapping):
        groups = list(groups.values())
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        return 0
    return sum(1 for each in groups if isinstance(each, Mapping) and _whole(each.get("pg_size")) > 1)


def _is_slice(event: Any) -> bool:
    if not isinstance(event, Mapping) or event.get("ph") != "X":
        return False
    return all(_is_time(event.get(key)) for key in ("ts", "dur"))


def _is_time(value: Any) -> bool:
    # Microseconds: a thousand years, of which the product with a thousand is exact enough.
    return isinstance(value, int | float) and abs(value) < 1e16


def _span(event: Mapping[str, Any], base_ns: int) -> Span:
    # In the file: microseconds with three digits.
    begin_ns = base_ns + round(event["ts"] * 1000)
    return begin_ns, begin_ns + max(round(event["dur"] * 1000), 0)


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, Mapping) else {}


def _spelling(name: str) -> str:
    return _SPELLINGS.get(name, name)


def _whole(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        return int(value)
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 63 else 0


def _input_bytes(args: Mapping[str, Any]) -> int:
    """The bytes of the tensors that an operator got, if shapes were recorded."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, Sequence) or isinstance(dims, str):
        return 0
    known = types if isinstance(types, Sequence) and not isinstance(types, str) else ()
    total = 0
    for number, shape in enumerate(dims):
        kind = str(known[number]) if number < len(known) else ""
        total += _elements(shape) * _type_bytes(kind)
    return total


def _elements(shape: Any) -> int:
    """The elements of a tensor, or of a list of tensors."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not shape:
        return 0
    if all(isinstance(each, Sequence) for each in shape):
        return sum(_elements(each) for each in shape)
    return math.prod(_whole(each) for each in shape)


def _type_bytes(kind: str) -> int:
    """The bytes of an element. Lists of tensors have no type in the trace; gradients are float32 there."""
    return next((size for word, size in _TYPE_BYTES if word in kind.lower()), 4)
