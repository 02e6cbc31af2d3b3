"""What may make a slow rank slow, in words; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from elaunch.agent.core.slow_ranks import Slow, median


@dataclass(frozen=True)
class Traits:
    """What may make a rank slower than others of its node. Shares are of the time.

    `cpus` is how many CPUs it may use, `nice` its nice value. Of the time in which it wanted a CPU it had none for
    `delayed`. Its cgroup throttled it for `throttled`, and its children (data loaders) used `children` CPUs.
    `major_faults` are pages read from a disk, per second. `clock_mhz` is its GPU's clock, 0 if unknown, and
    `limited_by` are the driver's reasons for a low one.
    """

    cpus: int
    nice: int
    delayed: float
    throttled: float
    children: float
    major_faults: float
    clock_mhz: int = 0
    limited_by: str = ""


class Cause(Enum):
    """What may make a rank slow. The value is its name on the timeline."""

    CPUS = "fewer CPUs"
    NICE = "nice value"
    CONTENTION = "busy CPUs"
    CPU_LIMIT = "CPU limit"
    DISK = "disk reads"
    DATA_LOADING = "data loading"
    GPU_CLOCK = "GPU clock"


@dataclass(frozen=True)
class Difference:
    """One thing that differs, and the words for it."""

    cause: Cause
    words: str


def slow_words(rank: int, slow: Slow, found: Sequence[Difference] | None) -> str:
    """The sentence for the log, with what differs; None where that could not be read."""
    said = (
        f"rank {rank} is slower than the other ranks of this node: they wait for {slow.wait_share:.0%} of the time,"
        f" for the last {slow.lasted_s:.0f} s{slow.seen}"
    )
    return said if found is None else f"{said}; {', and '.join(each.words for each in found) or _NOTHING_DIFFERS}"


_MORE_WORK = "it may have more work: longer samples, or a part of the program that only this rank runs or waits for"
_NOTHING_DIFFERS = f"its CPUs, its GPU and its data loaders are like theirs, so {_MORE_WORK}"


def differences(own: Traits, others: Sequence[Traits]) -> tuple[Difference, ...]:
    """What may make the process of `own` slow, compared with those of `others`, one at least."""

    def theirs(value: Callable[[Traits], float]) -> float:
        return median(value(other) for other in others)

    found = []
    if own.cpus < (cpus := theirs(lambda t: t.cpus)):
        found.append(Difference(Cause.CPUS, f"it may use {_cpus(own.cpus)}, and they {_cpus(round(cpus))}"))
    if own.nice > (nice := theirs(lambda t: t.nice)):
        found.append(Difference(Cause.NICE, f"its nice value is {own.nice}, and theirs {nice:.0f}"))
    if own.delayed >= 0.2 and own.delayed >= 1.5 * (delayed := theirs(lambda t: t.delayed)):
        words = f"when it wants a CPU it has to wait for {own.delayed:.0%} of that time, and they for {delayed:.0%}"
        found.append(Difference(Cause.CONTENTION, f"{words}: other processes use its CPUs"))
    if own.throttled >= 0.05:
        words = f"its cgroup's limit (cpu.max) holds it back for {own.throttled:.0%} of the time"
        found.append(Difference(Cause.CPU_LIMIT, words))
    if own.major_faults >= 10 and own.major_faults >= 3 * theirs(lambda t: t.major_faults):
        words = f"it reads {own.major_faults:.0f} pages a second from a disk (swap, or mapped files)"
        found.append(Difference(Cause.DISK, words))
    if own.children >= 0.5 and own.children >= 1.5 * (children := theirs(lambda t: t.children)):
        words = f"its data loaders use {own.children:.1f} CPUs, and theirs {children:.1f}"
        found.append(Difference(Cause.DATA_LOADING, words))
    if own.clock_mhz and own.clock_mhz < 0.9 * (clock_mhz := theirs(lambda t: t.clock_mhz)):
        limited = f", limited by {own.limited_by}" if own.limited_by else ""
        words = f"its GPU runs at {own.clock_mhz} MHz, and theirs at {clock_mhz:.0f} MHz{limited}"
        found.append(Difference(Cause.GPU_CLOCK, words))
    return tuple(found)


def _cpus(count: int) -> str:
    return "1 CPU" if count == 1 else f"{count} CPUs"
