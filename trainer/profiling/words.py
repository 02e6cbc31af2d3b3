"""The summary as sentences, and as the record of `profile.json` (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elaunch.trainer.profiling.clocks import ClockOffset
from elaunch.trainer.profiling.steps import StepWindow
from elaunch.trainer.profiling.summary import Bucket, ProfileSummary, StepShare

# The version of the record. It grows when a field goes or changes its meaning; a reader skips what it does not know.
SCHEMA = 1
# A rank is named if it caused this share of all waiting, and of the time of the steps.
_MOST, _WORTH = 0.5, 0.01
# Names in a sentence.
_NAMED = 3
# Idle GPUs are worth a word from this share of a step on.
_IDLE = 0.1
# Collectives in the record; the rest of a long list says nothing new.
BUCKETS_MAX = 4000


def sentences(summary: ProfileSummary) -> list[str]:
    """One to three sentences, and what is not known."""
    if not summary.shares:
        return ["nothing is known of the profiled steps", *summary.remarks]
    window = StepWindow(summary.first_step, summary.last_step)
    each = " each" if window.count > 1 else ""
    said = [f"{window} took {_time(summary.mean('length_ns'))}{each}{_communication(summary)}"]
    said += _straggler(summary)
    said += _device(summary)
    return [*said, *summary.remarks]


def _communication(summary: ProfileSummary) -> str:
    overlap, whole_ns = summary.overlap, summary.mean("communication_ns")
    if overlap is None:
        several = len({share.rank for share in summary.shares}) > 1
        return ", and the ranks exchanged nothing" if several else ""
    reduce_ns, exposed_ns = summary.mean("all_reduce_ns"), summary.mean("exposed_all_reduce_ns")
    only_reduces = reduce_ns and reduce_ns >= 0.99 * whole_ns
    if not only_reduces:
        exposed_ns = summary.mean("exposed_ns")
    share = exposed_ns / summary.mean("length_ns")
    what = "all-reduce" if only_reduces else "communication"
    return (
        f": {what} was under way for {_time(whole_ns)}, of which {_time(exposed_ns)} were exposed "
        f"({share:.0%} of the step); computation covered {overlap:.0%}"
    )


def _straggler(summary: ProfileSummary) -> list[str]:
    total_ns = sum(each.late_ns for each in summary.stragglers)
    if summary.matched == 0:
        return []
    steps_ns = summary.mean("length_ns") * (summary.last_step - summary.first_step + 1)
    worst = summary.stragglers[0] if summary.stragglers else None
    if worst is None or total_ns < _WORTH * steps_ns:
        return [f"no rank kept the others waiting: {_collectives(summary.matched)} compared"]
    if worst.late_ns < _MOST * total_ns:
        each = ", ".join(f"rank {one.rank} {_time(one.late_ns)}" for one in summary.stragglers[:_NAMED])
        return [f"several ranks kept the others waiting in turns: {each} in {_collectives(summary.matched)}"]
    longest = max((bucket for bucket in summary.buckets if bucket.last == worst.rank), key=lambda each: each.late_ns)
    said = f"rank {worst.rank} came {_time(longest.late_ns)} late to {_collective(summary, longest)}; the others waited"
    if worst.times == 1:
        return [said]
    mean = _time(worst.late_ns / worst.times)
    return [f"{said}. It was the last in {worst.times} of {summary.matched} collectives, by {mean} on average"]


def _collective(summary: ProfileSummary, one: Bucket) -> str:
    """Which one it is: by its kind, and its place among those of its kind in the step."""
    alike = [each for each in summary.buckets if (each.step, each.kind) == (one.step, one.kind)]
    number = next(number for number, each in enumerate(alike, 1) if each is one)
    return f"{one.kind.replace('_', '-')} {number} of step {one.step}"


def _collectives(count: int) -> str:
    return f"{count} collective{'s' if count != 1 else ''}"


def _device(summary: ProfileSummary) -> list[str]:
    said = []
    if summary.on_gpu:
        said.append(f"GPUs computed for {summary.mean('computation_ns') / summary.mean('length_ns'):.0%} of the time")
    if summary.mfu is not None:
        said.append(f"MFU {summary.mfu:.1%} (the profiler slows the steps down: metrics.jsonl has the usual one)")
    return ["; ".join(said), *_host(summary)] if said else []


def _host(summary: ProfileSummary) -> list[str]:
    idle = summary.mean("idle_ns") / summary.mean("length_ns")
    if not summary.on_gpu or not summary.host_ns or idle < _IDLE:
        return []
    longest = ", ".join(f"{name} {_time(ns)}" for name, ns in [*summary.host_ns.items()][:_NAMED])
    whose = "the GPU" if len({share.rank for share in summary.shares}) == 1 else "each GPU"
    return [f"{whose} waited for its host {idle:.0%} of the time; in each step the host was meanwhile in {longest}"]


def _time(ns: float) -> str:
    if ns >= 1e9:
        return f"{ns / 1e9:.2f} s"
    return f"{ns / 1e6:.1f} ms" if ns >= 1e5 else f"{ns / 1e6:.2f} ms"


def record(
    summary: ProfileSummary, *, generation: int, ranks: Sequence[Mapping[str, Any]], trace: str
) -> dict[str, Any]:
    """The summary for programs: durations in seconds, sizes in bytes. `trace` is the merged file's name, or empty."""
    shown = summary.buckets[:BUCKETS_MAX]
    return {
        "schema": SCHEMA,
        "generation": generation,
        "first_step": summary.first_step,
        "last_step": summary.last_step,
        "sentences": sentences(summary),
        "trace": trace,
        "ranks": list(ranks),
        "step_s": _seconds(summary.mean("length_ns")),
        "computation_s": _seconds(summary.mean("computation_ns")),
        "communication_s": _seconds(summary.mean("communication_ns")),
        "exposed_s": _seconds(summary.mean("exposed_ns")),
        "exposed_all_reduce_s": _seconds(summary.mean("exposed_all_reduce_ns")),
        "overlap": _share(summary.overlap),
        "on_gpu": summary.on_gpu,
        "gpu_busy": _share(summary.mean("computation_ns") / summary.mean("length_ns")) if _has_gpu(summary) else None,
        "gpu_idle": _share(summary.mean("idle_ns") / summary.mean("length_ns")) if _has_gpu(summary) else None,
        "host_s": {name: _seconds(ns) for name, ns in summary.host_ns.items()},
        "mfu": _share(summary.mfu),
        "steps": [_step(share) for share in summary.shares],
        "buckets": [_bucket(bucket) for bucket in shown],
        "buckets_left_out": len(summary.buckets) - len(shown),
        "collectives_compared": summary.matched,
        "stragglers": [
            {"rank": each.rank, "times": each.times, "late_s": _seconds(each.late_ns)} for each in summary.stragglers
        ],
    }


def rank_record(rank: int, *, host: str, file: str, offset: ClockOffset, trouble: str) -> dict[str, Any]:
    """What the record says of one rank's trace."""
    return {
        "rank": rank,
        "host": host,
        "file": file,
        "clock_ahead_s": _seconds(offset.ahead_ns),
        "clock_error_s": _seconds(offset.error_ns),
        "trouble": trouble,
    }


def _has_gpu(summary: ProfileSummary) -> bool:
    return summary.on_gpu and bool(summary.shares)


def _step(share: StepShare) -> dict[str, Any]:
    return {
        "step": share.step,
        "rank": share.rank,
        "seconds": _seconds(share.length_ns),
        "computation_s": _seconds(share.computation_ns),
        "communication_s": _seconds(share.communication_ns),
        "exposed_s": _seconds(share.exposed_ns),
        "exposed_all_reduce_s": _seconds(share.exposed_all_reduce_ns),
        "overlap": _share(share.overlap),
    }


def _bucket(bucket: Bucket) -> dict[str, Any]:
    return {
        "step": bucket.step,
        "kind": bucket.kind,
        "bytes": bucket.bytes,
        "begins_s": {str(rank): _seconds(ns) for rank, ns in bucket.begins_ns.items()},
        "lengths_s": {str(rank): _seconds(ns) for rank, ns in bucket.lengths_ns.items()},
        "last": bucket.last if bucket.last >= 0 else None,
        "late_s": _seconds(bucket.late_ns),
    }


def _seconds(ns: float) -> float:
    return round(ns / 1e9, 9)


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
