"""The summary as sentences, and as the record that `elaunch report` reads (pure)."""

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
        return ", and the ranks exchanged nothing"
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
    if worst is None or worst.late_ns < _MOST * total_ns or worst.late_ns < _WORTH * steps_ns:
        return [f"no rank was regularly the last to begin a collective, of {summary.matched}"]
    mean_ns = worst.late_ns / worst.times
    return [
        f"rank {worst.rank} began {worst.times} of {summary.matched} collectives last, "
        f"{_time(mean_ns)} after the others on average"
    ]


def _device(summary: ProfileSummary) -> list[str]:
    said = []
    if summary.on_gpu:
        said.append(f"GPUs computed for {summary.mean('computation_ns') / summary.mean('length_ns'):.0%} of the time")
    if summary.mfu is not None:
        said.append(f"MFU {summary.mfu:.1%} (the profiler slows the steps down: metrics.jsonl has the usual one)")
    return ["; ".join(said)] if said else []


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
