"""What the workers of this node and its host use, read when somebody asks."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from elaunch.rendezvous.rules.reports import NodeReport, RankReport


def with_usage(report: NodeReport) -> NodeReport:
    """The report with the memory of its ranks, and with the memory, CPUs and load of this host."""
    try:
        # Not before somebody asks: an agent runs for weeks, and has this memory too.
        import psutil
    except ImportError:
        # Upgraded or removed while the job runs.
        return report
    report = replace(report, ranks=tuple(map(_with_memory, report.ranks)))
    # Whoever asks must not end a job: without a part of /proc (systemd's ProcSubset=pid) psutil raises many things.
    with suppress(Exception):
        memory = psutil.virtual_memory()
        report = replace(report, memory_bytes=memory.total, memory_free_bytes=memory.available)
    with suppress(Exception):
        report = replace(report, cpus=psutil.cpu_count(), load=os.getloadavg()[0])
    return report


def _with_memory(rank: RankReport) -> RankReport:
    import psutil

    with suppress(Exception):
        if rank.pid > 0:
            return replace(rank, memory_bytes=psutil.Process(rank.pid).memory_info().rss)
    return rank
