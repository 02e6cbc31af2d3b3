"""Names a rank that the other ranks wait for, with what is different about its process and its GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elaunch.agent import linux
from elaunch.agent.core.slow_causes import Traits, differences, slow_words
from elaunch.agent.core.slow_ranks import Slow, SlowRanks
from elaunch.agent.core.standstill import Window
from elaunch.agent.linux import start_thread
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.reporter import Reporter

if TYPE_CHECKING:
    from elaunch.agent.core.collectives import Counts
    from elaunch.agent.core.late_ranks import Behind
    from elaunch.agent.core.wait_shares import WaitShares
    from elaunch.agent.workers.flight_recorder import FlightRecorder

_TICKS = os.sysconf("SC_CLK_TCK")
# Rates are measured over this time.
_SPAN_S = 2.0
# A recorder that keeps more entries is not read while the program works: it takes the worker 30 µs for each.
_ENTRIES_MAX = 4000


class SlowMonitor:
    """Follows the samples of one generation after the other. A rank is named once in an agent's life."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._ranks = SlowRanks()
        self._behind: Behind | None = None
        self._waits: WaitShares | None = None
        self._shares: Mapping[int, float] = {}
        self._generation = -1
        self._told: set[int] = set()

    def sampled(self, group: WorkerGroup, looks: Mapping[int, Window]) -> None:
        """Take another look at this generation's workers into account."""
        self._begin(group)
        self._ranks, slow = self._ranks.after(looks)
        if slow and self._is_new(group.rank(slow.local_rank)):
            start_thread(lambda: self._tell(group, slow), "elaunch-slow-rank")

    def counted(self, group: WorkerGroup, counts: Mapping[int, Counts]) -> None:
        """Take another look at how many collectives the workers have entered into account."""
        self._begin(group)
        # Imported here: a program without a process group never needs it.
        from elaunch.agent.core.late_ranks import Behind

        self._behind, local_rank = (self._behind or Behind()).after(counts)
        if local_rank is not None and group.rank(local_rank) not in self._told:
            recorders = group.recorders
            start_thread(lambda: self._look_into(group, local_rank, recorders), "elaunch-slow-rank")
        from elaunch.agent.core.wait_shares import WaitShares

        self._waits, shares = (self._waits or WaitShares()).after(counts)
        self._shares = shares or self._shares

    def wait_shares(self, generation: int) -> Mapping[int, float]:
        """For which share of the last minutes each worker of that generation waited in collectives, by local rank."""
        return self._shares if generation == self._generation else {}

    def _begin(self, group: WorkerGroup) -> None:
        if group.generation != self._generation:
            self._generation, self._ranks, self._behind, self._waits = group.generation, SlowRanks(), None, None
            self._shares = {}

    def _is_new(self, rank: int) -> bool:
        """Whether it was not named yet. From now on it was."""
        is_new = rank not in self._told
        self._told.add(rank)
        return is_new

    def _look_into(self, group: WorkerGroup, local_rank: int, recorders: Mapping[int, FlightRecorder]) -> None:
        from elaunch.agent.core.late_ranks import LOOKS, WINDOWS, late_rank
        from elaunch.agent.workers.flight_recorder import all_entries

        late = late_rank(all_entries(recorders, _ENTRIES_MAX))
        if late and late.rank == local_rank and self._is_new(group.rank(local_rank)):
            seen = f"; it enters a collective {late.late_s * 1e3:.0f} ms after all of them"
            self._tell(group, Slow(local_rank, late.share, float(LOOKS * WINDOWS), seen))

    def _tell(self, group: WorkerGroup, slow: Slow) -> None:
        traits = read_traits({local_rank: pid for local_rank, pid in group.pids.items() if pid > 0})
        rank, own = group.rank(slow.local_rank), traits.get(slow.local_rank)
        others = [found for local_rank, found in traits.items() if local_rank != slow.local_rank]
        found = differences(own, others) if own and others else None
        text = slow_words(rank, slow, found)
        self._reporter.timeline.stamp(
            group.generation,
            "slow",
            rank=rank,
            wait_percent=round(100 * slow.wait_share),
            lasted_s=round(slow.lasted_s),
            causes=[each.cause.value for each in found or ()],
            text=text,
        )
        self._reporter.warn(text)


class _Counters(NamedTuple):
    """Counters of a process: seconds on a CPU, in the queue for one, throttled; its children on a CPU; pages read."""

    ran_s: float
    delayed_s: float
    throttled_s: float
    children_s: float
    major_faults: int


def read_traits(pids: Mapping[int, int]) -> dict[int, Traits]:
    """What may make these processes slow, measured over 2 s. One that is gone is left out."""
    before = _counters(pids)
    begun_s = time.monotonic()
    time.sleep(_SPAN_S)
    after, span_s = _counters(pids), time.monotonic() - begun_s
    clocks = _gpu_clocks(set(pids.values()))
    found = {}
    for key, pid in pids.items():
        if key not in before or key not in after:
            continue
        one, two = before[key], after[key]
        with suppress(OSError):
            clock_mhz, limited_by = clocks.get(pid, (0, ""))
            found[key] = Traits(
                cpus=len(os.sched_getaffinity(pid)),
                nice=os.getpriority(os.PRIO_PROCESS, pid),
                delayed=_share(two.delayed_s - one.delayed_s, two.ran_s - one.ran_s),
                throttled=min((two.throttled_s - one.throttled_s) / span_s, 1.0),
                children=max(two.children_s - one.children_s, 0.0) / span_s,
                major_faults=(two.major_faults - one.major_faults) / span_s,
                clock_mhz=clock_mhz,
                limited_by=limited_by,
            )
    return found


def _counters(pids: Mapping[int, int]) -> dict[int, _Counters]:
    found = {}
    for key, pid in pids.items():
        with suppress(OSError, ValueError, IndexError):
            ran_s, delayed_s = (int(ns) / 1e9 for ns in Path(f"/proc/{pid}/schedstat").read_bytes().split()[:2])
            children_s = sum(_cpu_s(child) for child in linux.children(pid))
            found[key] = _Counters(ran_s, delayed_s, _throttled_s(pid), children_s, int(linux.stat_fields(pid)[9]))
    return found


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest > 0 else 0.0


def _cpu_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return sum(int(ticks) for ticks in linux.stat_fields(pid)[11:13]) / _TICKS
    return 0.0


def _throttled_s(pid: int) -> float:
    """Seconds for which the CPU limit of the process's cgroup (version 2) has held it back; 0 if it has none."""
    with suppress(OSError, ValueError, IndexError):
        path = next(line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line[:3] == "0::")
        lines = Path(f"/sys/fs/cgroup{path}/cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) / 1e6 for line in lines if line.startswith("throttled_usec"))
    return 0.0


def _gpu_clocks(pids: set[int]) -> dict[int, tuple[int, str]]:
    """The clock (MHz) of the GPU on which each process computes, and what limits it; by pid. Without NVML, nothing."""
    # Imported here: a healthy job never needs it.
    from elaunch.agent.workers.nvml import opened_nvml

    found: dict[int, tuple[int, str]] = {}
    with opened_nvml() as nvml:
        if nvml is None:
            return found
        with suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                mine = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)} & pids
                if mine:
                    clock_mhz = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
                    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
                    found.update(dict.fromkeys(mine, (clock_mhz, _reasons(nvml, reasons))))
    return found


def _reasons(nvml: Any, reasons: int) -> str:
    names = (
        ("nvmlClocksThrottleReasonHwThermalSlowdown", "its temperature"),
        ("nvmlClocksThrottleReasonSwThermalSlowdown", "its temperature"),
        ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "the power supply"),
        ("nvmlClocksThrottleReasonSwPowerCap", "its power limit"),
        ("nvmlClocksThrottleReasonApplicationsClocksSetting", "the clock that was set for it"),
    )
    found = [words for name, words in names if reasons & getattr(nvml, name, 0)]
    return " and ".join(dict.fromkeys(found))
