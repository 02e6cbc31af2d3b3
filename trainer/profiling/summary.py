"""What the profiled steps of all ranks say together: communication that nothing covers, overlap, who came last (pure).

Communication is exposed while the rank computes nothing: it only waits. Two ranks' collectives are matched by step,
process group, kind, size and order. A rank comes last to a collective if it begins it last; the others wait for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elaunch.trainer.profiling.activity import RankActivity, RankCollective
from elaunch.trainer.profiling.clocks import ClockOffset
from elaunch.trainer.profiling.intervals import clip, length, minus, union

ALL_REDUCE = "all_reduce"
# In these no rank can end before all have begun. In others, as a broadcast, a late rank may keep nobody waiting.
_WAIT_FOR_ALL = (ALL_REDUCE, "all_gather", "reduce_scatter", "all_to_all", "barrier")
# A rank that is less behind than this is not late: so long takes a thread to wake up.
LATE_NS = 100_000


@dataclass(frozen=True)
class StepShare:
    """How one rank spent a step, in ns. `exposed` is communication that no computation of this rank covers."""

    rank: int
    step: int
    length_ns: int
    computation_ns: int
    communication_ns: int
    exposed_ns: int
    all_reduce_ns: int
    exposed_all_reduce_ns: int

    @property
    def overlap(self) -> float | None:
        """The share of communication that computation covers; None without communication."""
        return 1 - self.exposed_ns / self.communication_ns if self.communication_ns else None

    @property
    def idle_ns(self) -> int:
        """The time in which it neither computes nor communicates."""
        return self.length_ns - self.computation_ns - self.exposed_ns


@dataclass(frozen=True)
class Bucket:
    """A collective as all its ranks had it: one bucket of gradients, or another one.

    `begins_ns` are from the begin of the step on rank 0, on its clock, by rank. `last` is the rank that began it last,
    -1 if none was late; `late_ns` how long after the others, in the median of these. `is_compared` says that this is
    known.
    """

    step: int
    kind: str
    bytes: int
    begins_ns: Mapping[int, int]
    lengths_ns: Mapping[int, int]
    last: int
    late_ns: int
    is_compared: bool


@dataclass(frozen=True)
class Straggler:
    """How often a rank came last, and by how much in all."""

    rank: int
    times: int
    late_ns: int


@dataclass(frozen=True)
class ProfileSummary:
    """All that is known of the profiled steps. `remarks` are sentences about what is not known, and why.

    `host_ns` says what the hosts were in while their GPUs had nothing to do: the mean of a step, the longest first.
    """

    first_step: int
    last_step: int
    shares: tuple[StepShare, ...]
    buckets: tuple[Bucket, ...]
    stragglers: tuple[Straggler, ...]
    on_gpu: bool
    mfu: float | None
    remarks: tuple[str, ...]
    host_ns: Mapping[str, float] = field(default_factory=dict)

    def mean(self, value: str) -> float:
        """The mean of a field of the shares over all ranks and steps, in ns."""
        return sum(getattr(share, value) for share in self.shares) / len(self.shares) if self.shares else 0.0

    @property
    def overlap(self) -> float | None:
        """The share of all ranks' communication that computation covers; None without communication."""
        whole = self.mean("communication_ns")
        return 1 - self.mean("exposed_ns") / whole if whole else None

    @property
    def matched(self) -> int:
        """The collectives of which it is known who came last."""
        return sum(bucket.is_compared for bucket in self.buckets)


def summarize(
    activities: Sequence[RankActivity],
    offsets: Sequence[ClockOffset],
    *,
    flops_per_step: float = 0.0,
    peak_flops: float = 0.0,
) -> ProfileSummary:
    """The summary of all ranks, by rank. `flops_per_step` and `peak_flops` are those of all devices together."""
    known = [each for each in activities if not each.trouble]
    remarks = [f"rank {each.rank} has no trace: {each.trouble}" for each in activities if each.trouble]
    shares = tuple(share for activity in known for share in _shares(activity))
    numbers = [share.step for share in shares] or [0]
    buckets, unmatched = _buckets(known, offsets)
    if unmatched:
        remarks.append(unmatched)
    worst_ns = max((offset.error_ns for offset in offsets), default=0)
    if worst_ns > LATE_NS:
        remarks.append(f"the clocks of the hosts are known to {worst_ns / 1e6:.1f} ms only")
    step_s = sum(share.length_ns for share in shares) / max(len(shares), 1) / 1e9
    return ProfileSummary(
        min(numbers),
        max(numbers),
        shares,
        buckets,
        _stragglers(buckets),
        any(each.on_gpu for each in known),
        flops_per_step / step_s / peak_flops if peak_flops and flops_per_step and step_s else None,
        tuple(remarks),
        _host(known, len(shares)),
    )


def _host(activities: Sequence[RankActivity], steps: int) -> dict[str, float]:
    total: Counter[str] = Counter()
    for each in activities:
        total.update(each.host_ns)
    return {name: ns / steps for name, ns in total.most_common()}


def _shares(activity: RankActivity) -> Iterator[StepShare]:
    computes = activity.computes
    communicates = union((each.begin_ns, each.end_ns) for each in activity.collectives)
    reduces = union((each.begin_ns, each.end_ns) for each in activity.collectives if each.kind == ALL_REDUCE)
    exposed, exposed_reduces = minus(communicates, computes), minus(reduces, computes)
    for step in activity.steps:
        parts = (length(clip(spans, step.begin_ns, step.end_ns)) for spans in (computes, communicates, exposed))
        of_reduces = (length(clip(spans, step.begin_ns, step.end_ns)) for spans in (reduces, exposed_reduces))
        yield StepShare(activity.rank, step.number, step.end_ns - step.begin_ns, *parts, *of_reduces)


_Key = tuple[int, str, str, int, int]


def _buckets(activities: Sequence[RankActivity], offsets: Sequence[ClockOffset]) -> tuple[tuple[Bucket, ...], str]:
    """The collectives of all ranks; and a sentence if those of different ranks cannot be matched."""
    found: dict[_Key, dict[int, tuple[int, int]]] = defaultdict(dict)
    nameless = any(not c.group for each in activities for c in each.collectives)
    several = max((each.groups for each in activities), default=0) > 1
    for activity in activities:
        ahead_ns = offsets[activity.rank].ahead_ns
        for key, each in _numbered(activity):
            found[key][activity.rank] = each.begin_ns - ahead_ns, each.end_ns - ahead_ns
    counts = Counter(len(by_rank) for by_rank in found.values())
    sentence = ""
    if nameless and several:
        sentence = "several process groups exchange data, and the traces do not name them: who came last is not known"
    elif nameless and len(activities) > 1 and counts.get(len(activities), 0) < len(found):
        sentence = "the ranks' collectives differ: who came last is known only for those that all have"
    starts = _starts(activities, offsets)
    buckets = []
    for (step, _, kind, size, _), by_rank in sorted(found.items(), key=_first_begin):
        is_one = len(by_rank) > 1 and kind in _WAIT_FOR_ALL
        is_compared = is_one and not (nameless and (several or len(by_rank) < len(activities)))
        last, late_ns = _last(by_rank) if is_compared else (-1, 0)
        start_ns = starts.get(step, 0)
        begins_ns = {rank: begin - start_ns for rank, (begin, _) in sorted(by_rank.items())}
        lengths_ns = {rank: end - begin for rank, (begin, end) in sorted(by_rank.items())}
        buckets.append(Bucket(step, kind, size, begins_ns, lengths_ns, last, late_ns, is_compared))
    return tuple(buckets), sentence


def _first_begin(one: tuple[_Key, Mapping[int, tuple[int, int]]]) -> tuple[int, int]:
    (step, *_), by_rank = one
    return step, min(begin for begin, _ in by_rank.values())


def _numbered(activity: RankActivity) -> list[tuple[_Key, RankCollective]]:
    """The rank's collectives with what makes them the same as another rank's."""
    seen: Counter[tuple[int, str, str, int]] = Counter()
    numbered = []
    for each in activity.collectives:
        step = next((s.number for s in activity.steps if s.begin_ns <= each.begin_ns < s.end_ns), None)
        if step is None:
            continue
        kind = (step, each.group, each.kind, each.bytes)
        numbered.append(((*kind, seen[kind]), each))
        seen[kind] += 1
    return numbered


def _starts(activities: Sequence[RankActivity], offsets: Sequence[ClockOffset]) -> dict[int, int]:
    """When each step began on the lowest rank, on rank 0's clock."""
    starts: dict[int, int] = {}
    for activity in activities:
        for step in activity.steps:
            starts.setdefault(step.number, step.begin_ns - offsets[activity.rank].ahead_ns)
    return starts


def _last(by_rank: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """The rank that began last and how long after the others, in their median; -1 if it was not late."""
    begins = sorted((begin, rank) for rank, (begin, _) in by_rank.items())
    begin_ns, rank = begins[-1]
    late_ns = begin_ns - begins[(len(begins) - 2) // 2][0]
    return (rank, late_ns) if late_ns >= LATE_NS else (-1, 0)


def _stragglers(buckets: Sequence[Bucket]) -> tuple[Straggler, ...]:
    """The ranks that came last, the one that cost most first."""
    late: dict[int, list[int]] = defaultdict(list)
    for bucket in buckets:
        if bucket.last >= 0:
            late[bucket.last].append(bucket.late_ns)
    found = (Straggler(rank, len(times), sum(times)) for rank, times in late.items())
    return tuple(sorted(found, key=lambda each: (-each.late_ns, each.rank)))
