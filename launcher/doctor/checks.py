"""The list of checks: what each reads, within which time, and who judges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.launcher.doctor.children import Task, Unfinished, run_all
from elaunch.launcher.doctor.facts import Needs
from elaunch.launcher.doctor.findings import Finding, Grade, bad, worst
from elaunch.launcher.doctor.judging import gpus, host, network
from elaunch.launcher.doctor.reading import gpus as read_gpus
from elaunch.launcher.doctor.reading import host as read_host
from elaunch.launcher.doctor.reading import network as read_network
from elaunch.launcher.doctor.reading import programs
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan

_SOON_S = 5.0
_TORCH_S = 60.0
# Without persistence mode the driver takes seconds for each GPU.
_GPUS_S = 30.0
# A name that nobody knows, a dead endpoint, 20 requests, and three looks at its clock.
_STORE_S = 20.0


@dataclass(frozen=True)
class Check:
    """One check. `judge` takes the facts and the job's needs."""

    name: str
    read: Callable[[], object]
    judge: Callable[[Any, Needs], tuple[Finding, ...]]
    limit_s: float = _SOON_S


@dataclass(frozen=True)
class Checked:
    """A check with its findings, of which there is at least one. `facts` is what was read, None if nothing was."""

    name: str
    findings: tuple[Finding, ...]
    facts: Any = None

    @property
    def grade(self) -> Grade:
        return worst(finding.grade for finding in self.findings)


def checks_for(
    needs: Needs, plan: RendezvousPlan, environ: Mapping[str, str], scheduler: str, program_trouble: str
) -> tuple[Check, ...]:
    """All checks for a job, in the order in which they are shown."""
    gpu_count = len(read_gpus.usable_gpus(environ))
    limit_s = _TORCH_S - _SOON_S
    has_gpus = gpu_count > 0
    return (
        Check("system", lambda: read_host.read_system(scheduler, program_trouble), host.judge_system),
        Check(
            "torch",
            lambda: programs.read_torch(
                needs.interpreter, uses_python=needs.uses_python, has_gpus=has_gpus, limit_s=limit_s
            ),
            lambda facts, needs: gpus.judge_torch(facts, needs, gpu_count),
            _TORCH_S,
        ),
        Check("gpus", lambda: read_gpus.read_gpu_facts(environ), gpus.judge_gpus, _GPUS_S),
        Check("kernel log", read_gpus.read_kernel_log, gpus.judge_kernel_log),
        Check("rdma", read_gpus.read_rdma, gpus.judge_rdma),
        Check("names", lambda: read_network.read_names(plan), network.judge_names, 4 * _SOON_S),
        Check("address", lambda: read_network.read_address(plan), network.judge_address, 2 * _SOON_S),
        Check("ports", lambda: read_network.read_ports(plan, needs.ports), network.judge_ports, 2 * _SOON_S),
        Check("store", lambda: read_network.read_store(plan), network.judge_store, _STORE_S),
        Check("clock", read_host.read_clock, host.judge_clock),
        Check("shm", read_host.read_shm, host.judge_shm, 2 * _SOON_S),
        Check("disk", lambda: read_host.read_disks(needs, environ), host.judge_disk, 2 * _SOON_S),
        Check("limits", read_host.read_limits, host.judge_limits),
        Check("memory", read_host.read_memory, host.judge_memory),
        Check("cpu", lambda: read_host.read_cpu(environ), host.judge_cpu),
        Check("cgroup", read_host.read_cgroup, host.judge_cgroup),
        Check("py-spy", lambda: programs.read_stacks(_SOON_S), host.judge_stacks, 2 * _SOON_S),
    )


def examine(checks: tuple[Check, ...], needs: Needs) -> tuple[Checked, ...]:
    """Run the checks side by side, each in a process of its own. Call it from a process with one thread."""
    facts = run_all({check.name: Task(check.read, check.limit_s) for check in checks})
    return tuple(judged(check, facts[check.name], needs) for check in checks)


def judged(check: Check, facts: object, needs: Needs) -> Checked:
    """The findings of a check. A check without a result is a finding itself."""
    if isinstance(facts, Unfinished):
        return Checked(check.name, (_unfinished(check, facts),))
    try:
        return Checked(check.name, check.judge(facts, needs), facts)
    except Exception as error:
        # A fault in one check must not hide the others.
        why = Unfinished(f"the check failed ({type(error).__name__}: {error})")
        return Checked(check.name, (_unfinished(check, why),), facts)


def _unfinished(check: Check, unfinished: Unfinished) -> Finding:
    if unfinished.is_late:
        return bad(f"{check.name}: {unfinished.why}", "something hangs: look at that device, disk or server")
    return bad(f"{check.name}: {unfinished.why}", "please report this, with the output of elaunch doctor --json")
