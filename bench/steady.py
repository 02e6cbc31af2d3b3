"""The cost of a launcher while two workers train: memory, CPU, wake-ups."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil

from bench.job import SCRIPTS, Contender, Job, Trouble
from bench.samples import Sample
from bench.stamps import all_at_s

SECTION = "steady"
WORKERS = 2
WINDOW_S = 1.0
# MB, % of one CPU, wake-ups per second.
AGENT_RSS, AGENT_PSS, CPU, WAKE_UPS = "agent RSS, MB", "agent PSS, MB", "agent CPU, %", "agent wake-ups, 1/s"
# torchrun's agent hosts the workers' store, and forks the workers. elaunch has a process of its own for each task.
ALL_CPU, ALL_WAKE_UPS = "launcher in all: CPU, %", "launcher in all: wake-ups, 1/s"
ALL_PSS = "launcher in all: PSS, MB"
GUARDIAN, FORK_SERVER, STORE, WORKER = "guardian PSS, MB", "fork server PSS, MB", "store PSS, MB", "PSS per worker, MB"
WORKER_RSS = "RSS per worker, MB"
_START_LIMIT_S = 120.0
_KIB_PER_MB = 1e6 / 1024


@dataclass(frozen=True)
class Cost:
    """The cost of one process in one window. `cpu` is in % of one CPU, `wake_ups` per second."""

    cpu: float
    wake_ups: float
    rss_mb: float
    pss_mb: float


def windows(contender: Contender, count: int) -> Iterator[Sample]:
    """One job, `count` windows of a second while it trains. MB, % of one CPU, wake-ups per second."""
    program = (str(SCRIPTS / "train.py"),)
    with Job(contender, WORKERS, program, env={"BENCH_STEPS": "0", "BENCH_STEP_S": "0.02"}) as job:
        try:
            job.wait_for(lambda: all_at_s(job.stamps(), 0, "training", WORKERS), "all were training", _START_LIMIT_S)
            family = family_of(job.process.pid, contender.ours)
            for _ in range(count):
                yield Sample(SECTION, contender.name, WORKERS, _window(job.process.pid, family))
        except (Trouble, psutil.Error, OSError) as trouble:
            yield Sample(SECTION, contender.name, WORKERS, why=str(trouble))


def family_of(agent: int, ours: bool) -> dict[str, list[int]]:
    """The pids by kind of process. Raises Trouble if the number of workers is not the wanted one."""
    found: dict[str, list[int]] = {}
    for child in psutil.Process(agent).children(recursive=True):
        title = " ".join(child.cmdline())
        if "guardian.py" in title:
            found.setdefault(GUARDIAN, []).append(child.pid)
        elif title.startswith("elaunch: fork server"):
            found.setdefault(FORK_SERVER, []).append(child.pid)
        elif title.startswith("elaunch: worker store"):
            found.setdefault(STORE, []).append(child.pid)
        elif not ours or FORK_SERVER in found:
            found.setdefault(WORKER, []).append(child.pid)
    if len(found.get(WORKER, [])) != WORKERS:
        raise Trouble(f"{len(found.get(WORKER, []))} processes below the agent seem to be workers, not {WORKERS}")
    return found


def _window(agent: int, family: Mapping[str, Sequence[int]]) -> dict[str, float]:
    pids = [agent, *(pid for pids in family.values() for pid in pids)]
    started_s = time.monotonic()
    before = {pid: (cpu_time_s(pid), voluntary_switches(pid)) for pid in pids}
    time.sleep(WINDOW_S)
    after = {pid: (cpu_time_s(pid), voluntary_switches(pid)) for pid in pids}
    seconds = time.monotonic() - started_s

    def cost(pid: int) -> Cost:
        (cpu_s, woken), (cpu_before_s, woken_before) = after[pid], before[pid]
        return Cost(100 * (cpu_s - cpu_before_s) / seconds, (woken - woken_before) / seconds, *memory_mb(pid))

    return summed(cost(agent), {name: [cost(pid) for pid in pids] for name, pids in family.items()})


def summed(agent: Cost, family: Mapping[str, Sequence[Cost]]) -> dict[str, float]:
    """A window's values: the agent's, the sums over all processes of the launcher, the means of each kind."""
    launcher = [agent, *(cost for name, costs in family.items() if name != WORKER for cost in costs)]
    values = {
        AGENT_RSS: agent.rss_mb,
        AGENT_PSS: agent.pss_mb,
        CPU: agent.cpu,
        WAKE_UPS: agent.wake_ups,
        ALL_PSS: sum(cost.pss_mb for cost in launcher),
        ALL_CPU: sum(cost.cpu for cost in launcher),
        ALL_WAKE_UPS: sum(cost.wake_ups for cost in launcher),
    }
    for name, costs in family.items():
        values[name] = fmean(cost.pss_mb for cost in costs)
        if name == WORKER:
            values[WORKER_RSS] = fmean(cost.rss_mb for cost in costs)
    return values


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident and proportional memory of a process (MB = 10^6 bytes)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    rss, pss = (re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("Rss", "Pss"))
    assert rss
    assert pss
    return int(rss[1]) / _KIB_PER_MB, int(pss[1]) / _KIB_PER_MB


def cpu_time_s(pid: int) -> float:
    """CPU time of all threads, as the scheduler counts it: /proc/*/stat counts only hundredths of a second."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def voluntary_switches(pid: int) -> int:
    """How often the threads have gone to sleep. They were woken as often."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(n) for text in texts for n in re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE))
