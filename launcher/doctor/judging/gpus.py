"""Judges GPUs, the kernel log's word on them, RDMA ports, and torch."""

from __future__ import annotations

from collections import Counter

from elaunch.launcher.doctor.facts import (
    NO_LIMIT,
    GpuFacts,
    GpuState,
    KernelLogFacts,
    Needs,
    RdmaFacts,
    TorchFacts,
)
from elaunch.launcher.doctor.findings import Finding, bad, ok, span, warn
from elaunch.rendezvous.texts import bytes_text

# Memory of a GPU that is in use though no process is seen: another container's, or a process that does not end.
_MEMORY_USED_MAX = 1 << 30
_SLOW_IMPORT_S = 15.0
_MEMLOCK_WANTED = 1 << 30
_SHOWN_MAX = 4
# Xids that a program cannot cause: https://docs.nvidia.com/deploy/xid-errors/
_HARDWARE_XIDS = {
    48: "an uncorrectable memory error",
    62: "its microcontroller stopped",
    63: "a row of memory waits to be taken out of use",
    64: "a row of memory could not be taken out of use",
    74: "an NVLink error",
    79: "it fell off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its firmware (GSP) does not answer",
    120: "its firmware (GSP) failed",
    140: "an unrecovered memory error",
}
_RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset -i {}), or reboot"


def judge_gpus(facts: GpuFacts, needs: Needs) -> tuple[Finding, ...]:
    if facts.trouble and not facts.source:
        return (
            warn(
                f"{facts.nodes} NVIDIA GPU(s), whose health cannot be read: {facts.trouble}",
                "pip install 'elaunch[gpu]'; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            ),
        )
    if facts.trouble:
        return (
            bad(
                f"{facts.nodes} NVIDIA GPU(s), but the driver does not answer: {facts.trouble}",
                "reboot, or reload the driver; after an update of the driver both parts must be of one version",
            ),
        )
    if not facts.gpus:
        return _without_nvidia(facts, needs)
    names = Counter(gpu.name for gpu in facts.gpus)
    kinds = ", ".join(f"{count} × {name}" for name, count in names.items())
    found = [ok(f"{kinds}, driver {facts.driver}, as {facts.source} says")]
    if len(names) > 1:
        found.append(
            warn(
                f"the GPUs differ: {kinds}",
                "all ranks wait for the slowest GPU; choose equal ones with CUDA_VISIBLE_DEVICES",
            )
        )
    if len(facts.gpus) < facts.nodes:
        found.append(
            bad(
                f"{facts.nodes} GPUs have device files, and the driver sees {len(facts.gpus)}",
                "a GPU may have fallen off the bus: look for Xid 79 in dmesg, and reboot",
            )
        )
    if needs.workers > facts.visible > 0:
        found.append(
            warn(
                f"{needs.workers} workers share {facts.visible} GPU(s)",
                "NCCL refuses two ranks on one GPU: use --nproc-per-node gpu",
            )
        )
    return (*found, *(finding for gpu in facts.gpus for finding in _gpu(gpu)))


def _without_nvidia(facts: GpuFacts, needs: Needs) -> tuple[Finding, ...]:
    if facts.vendor == "amd":
        return (ok(f"{facts.nodes} AMD GPU(s), {facts.visible} visible; elaunch does not read their health"),)
    if needs.wants_gpus:
        return (
            bad(
                "--nproc-per-node gpu needs an NVIDIA driver, and there is none here",
                "ask the scheduler for GPUs; in a container use the NVIDIA runtime (docker run --gpus all)",
            ),
        )
    return (ok("no NVIDIA driver here"),)


def _gpu(gpu: GpuState) -> tuple[Finding, ...]:
    """What is wrong with one GPU; nothing for a healthy and idle one."""
    who, reset = f"GPU {gpu.index}", _RESET.format(gpu.index)
    found = []
    if gpu.remap_failed:
        found.append(bad(f"{who} could not take a bad row of memory out of use", "have the vendor replace it (RMA)"))
    if gpu.uncorrected:
        found.append(bad(f"{who} had {gpu.uncorrected} uncorrectable memory errors since the driver was loaded", reset))
    if gpu.pending:
        found.append(bad(f"{who} waits for a reset to take bad memory out of use", reset))
    if gpu.temperature_c is not None and gpu.slows_at_c and gpu.temperature_c >= gpu.slows_at_c:
        found.append(
            warn(
                f"{who} is at {gpu.temperature_c} °C, and slows down from {gpu.slows_at_c} °C on",
                "check fans and airflow",
            )
        )
    elif gpu.slowed_by:
        found.append(warn(f"{who} is slowed down: {gpu.slowed_by}", "check the node's cooling and power supplies"))
    if gpu.processes:
        shown = ", ".join(
            f"{process.name or 'process'} (pid {process.pid}"
            + (f", {bytes_text(process.memory)})" if process.memory is not None else ")")
            for process in gpu.processes[:_SHOWN_MAX]
        )
        more = f" and {len(gpu.processes) - _SHOWN_MAX} more" if len(gpu.processes) > _SHOWN_MAX else ""
        found.append(
            warn(f"{who} is in use by {shown}{more}", "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES")
        )
    elif gpu.memory_used is not None and gpu.memory_total and gpu.memory_used > _MEMORY_USED_MAX:
        found.append(
            warn(
                f"{bytes_text(gpu.memory_used)} of {who}'s {bytes_text(gpu.memory_total)} are in use, by no process"
                " seen here",
                "look for its process in other containers: fuser -v /dev/nvidia* on the host",
            )
        )
    return tuple(found)


def judge_kernel_log(facts: KernelLogFacts, _needs: Needs) -> tuple[Finding, ...]:
    if not facts.is_readable:
        return (ok("the kernel log may not be read here, so it is not known whether a GPU failed (Xid)"),)
    serious = [event for event in facts.xids if event.xid in _HARDWARE_XIDS]
    if not serious:
        return (ok("the kernel log has no hardware error of a GPU (Xid)"),)
    newest: dict[tuple[str, int], tuple[float, int]] = {}
    for event in serious:
        age_s, count = newest.get((event.bus, event.xid), (event.age_s, 0))
        newest[event.bus, event.xid] = min(age_s, event.age_s), count + 1
    return tuple(
        warn(
            f"the kernel log has Xid {xid} of the GPU at {bus}: {_HARDWARE_XIDS[xid]}"
            f" ({f'{count} times, last ' if count > 1 else ''}{span(age_s)} ago)",
            "if the GPU was not reset since: drain the node and reset it, or reboot",
        )
        for (bus, xid), (age_s, count) in newest.items()
    )


def judge_rdma(facts: RdmaFacts, _needs: Needs) -> tuple[Finding, ...]:
    if not facts.ports:
        return (ok("no InfiniBand or RoCE device here"),)
    active = [name for name, state in facts.ports if state == "ACTIVE"]
    text = f"{len(active)} of {len(facts.ports)} InfiniBand or RoCE ports are active"
    found = [ok(text)]
    if not active:
        found = [warn(f"{text}, so NCCL uses TCP", "check cables, switch and subnet manager (ibstat)")]
    if active and facts.memlock not in (NO_LIMIT,) and facts.memlock < _MEMLOCK_WANTED and not facts.may_lock:
        found.append(
            warn(
                f"the limit of locked memory (ulimit -l) is {bytes_text(facts.memlock)}, and RDMA locks its buffers",
                "ulimit -l unlimited, in limits.conf or the scheduler's unit; docker run --ulimit memlock=-1",
            )
        )
    return tuple(found)


def judge_torch(facts: TorchFacts, needs: Needs, gpus: int = 0) -> tuple[Finding, ...]:
    """`gpus` is the number of GPUs that a process here may use."""
    if not needs.uses_python:
        return (ok("the program is a command; torch was not looked at"),)
    if facts.error:
        return (
            bad(
                f"{facts.interpreter} cannot import torch: {facts.error}",
                f"{facts.interpreter} -m pip install torch, or start elaunch from the environment that has it",
            ),
        )
    build = f"CUDA {facts.cuda}" if facts.cuda else "CPU build"
    nccl = f", NCCL {facts.nccl}" if facts.nccl else ""
    found = [ok(f"torch {facts.version} ({build}{nccl}), imported in {span(facts.seconds)}")]
    if facts.seconds > _SLOW_IMPORT_S:
        found = [
            warn(
                f"importing torch {facts.version} took {span(facts.seconds)}; each start of a job takes so long",
                "put the environment on a local disk",
            )
        ]
    if gpus and not facts.cuda:
        found.append(
            bad(
                f"{gpus} GPU(s), and torch {facts.version} is a build for CPUs",
                "install the build for CUDA: https://pytorch.org/get-started/locally",
            )
        )
    if facts.cuda_error:
        found.append(
            bad(f"CUDA does not start: {facts.cuda_error}", "run nvidia-smi; the driver may be too old for this torch")
        )
    if 0 < facts.peerless < facts.pairs:
        found.append(
            warn(
                f"of {facts.pairs} pairs of GPUs, {facts.peerless} cannot read each other's memory (P2P)",
                "run nvidia-smi topo -m; ACS or IOMMU may be on",
            )
        )
    elif facts.pairs:
        found.append(ok(f"P2P between {'no' if facts.peerless else 'all'} pairs of {facts.devices} GPUs"))
    return tuple(found)
