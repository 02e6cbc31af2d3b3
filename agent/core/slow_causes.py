"""What may make a slow rank slow, in words; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from elaunch.agent.core.slow_ranks import Slow, median
from elaunch.records import dataclass
from elaunch.rendezvous.rules.pace import slow_node_words


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
    HOST = "host"


@dataclass(frozen=True)
class Difference:
    """One thing that differs, and the words for it."""

    cause: Cause
    words: str


def slow_words(rank: int, slow: Slow, found: Sequence[Difference] | None, *, is_compared: bool = True) -> str:
    """The sentence for the log, with what differs; None where that could not be read.

    `is_compared` says that it was compared with the other ranks of its node.
    """
    if slow.among_nodes:
        said = slow_node_words(slow.among_nodes)
        nothing = _NOTHING_ON_NODE
        begin = "compared with the other ranks of its node, " if is_compared and found else ""
        if slow.among_nodes.is_whole:
            begin = f"as for rank {rank}, "
    else:
        said = (
            f"rank {rank} is slower than the other ranks of this node: they wait for {slow.wait_share:.0%} of the time,"
            f" for the last {slow.lasted_s:.0f} s{slow.seen}"
        )
        nothing, begin = _NOTHING_DIFFERS, ""
    if found is None:
        return said
    return f"{said}; {begin}{', and '.join(each.words for each in found) or nothing}"


_MORE_WORK = "it may have more work: longer samples, or a part of the program that only this rank runs or waits for"
_NOTHING_DIFFERS = f"its CPUs, its GPU and its data loaders are like theirs, so {_MORE_WORK}"
_NOTHING_ON_NODE = f"nothing is seen on its host that holds it back, so {_MORE_WORK}"


def differences(own: Traits, others: Sequence[Traits], *, is_whole_node: bool = False) -> tuple[Difference, ...]:
    """What may make the process of `own` slow.

    `others` are those of the node to compare it with. Without them only what slows down any process is found.
    """

    def theirs(value: Callable[[Traits], float]) -> float | None:
        return median(value(other) for other in others) if others else None

    found = []
    if (cpus := theirs(lambda t: t.cpus)) is not None and own.cpus < cpus:
        found.append(Difference(Cause.CPUS, f"it may use {_cpus(own.cpus)}, and they {_cpus(round(cpus))}"))
    if own.nice > ((nice := theirs(lambda t: t.nice)) or 0):
        compared = "" if nice is None else f", and theirs {nice:.0f}"
        found.append(Difference(Cause.NICE, f"its nice value is {own.nice}{compared}"))
    if own.delayed >= 0.2 and own.delayed >= 1.5 * ((delayed := theirs(lambda t: t.delayed)) or 0):
        compared = "" if delayed is None else f", and they for {delayed:.0%}"
        words = f"when it wants a CPU it has to wait for {own.delayed:.0%} of that time{compared}"
        found.append(Difference(Cause.CONTENTION, f"{words}: other processes use its CPUs"))
    if own.throttled >= 0.05:
        words = f"its cgroup's limit (cpu.max) holds it back for {own.throttled:.0%} of the time"
        found.append(Difference(Cause.CPU_LIMIT, words))
    if own.major_faults >= 10 and own.major_faults >= 3 * (theirs(lambda t: t.major_faults) or 0):
        words = f"it reads {own.major_faults:.0f} pages a second from a disk (swap, or mapped files)"
        found.append(Difference(Cause.DISK, words))
    children = theirs(lambda t: t.children)
    if children is not None and own.children >= 0.5 and own.children >= 1.5 * children:
        words = f"its data loaders use {own.children:.1f} CPUs, and theirs {children:.1f}"
        found.append(Difference(Cause.DATA_LOADING, words))
    if words := _of_gpu(own, theirs(lambda t: t.clock_mhz)):
        found.append(Difference(Cause.GPU_CLOCK, words))
    if is_whole_node:
        found.append(Difference(Cause.HOST, _OF_HOST))
    return tuple(found)


_OF_HOST = (
    "all ranks of its node are slow, so the cause may be the host: the clocks of its CPUs or GPUs, its disks, other"
    " programs that run there"
)


def _of_gpu(own: Traits, theirs_mhz: float | None) -> str:
    """The words if its GPU is slower than theirs; or, where there is none to compare with, if something limits it."""
    is_slow = bool(own.limited_by) if theirs_mhz is None else own.clock_mhz < 0.9 * theirs_mhz
    if not own.clock_mhz or not is_slow:
        return ""
    compared = "" if theirs_mhz is None else f", and theirs at {theirs_mhz:.0f} MHz"
    limited = f", limited by {own.limited_by}" if own.limited_by else ""
    return f"its GPU runs at {own.clock_mhz} MHz{compared}{limited}"


def _cpus(count: int) -> str:
    return "1 CPU" if count == 1 else f"{count} CPUs"
