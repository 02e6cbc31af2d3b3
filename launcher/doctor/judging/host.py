"""Judges this host: system, limits, memory, CPUs, disks, /dev/shm, cgroup, clock, and the right to read stacks."""

from __future__ import annotations

from elaunch.agent.diagnosis.causes.cause import TEMPORARY_MAX
from elaunch.agent.diagnosis.stacks import tracing_advice
from elaunch.launcher.doctor.facts import (
    NO_LIMIT,
    CgroupFacts,
    ClockFacts,
    CpuFacts,
    DiskFacts,
    LimitFacts,
    MemoryFacts,
    Needs,
    PlaceFacts,
    StackFacts,
    SystemFacts,
)
from elaunch.launcher.doctor.findings import Finding, bad, ok, span, warn
from elaunch.rendezvous.texts import bytes_text

_MIB, _GIB = 1 << 20, 1 << 30

# A worker's share of /dev/shm: NCCL's segments take up to 10 MB for each channel and peer, a data loader's processes
# pass two batches each through it. Docker's default is 64 MiB for the whole container.
_SHM_MIN, _SHM_WANTED = 32 * _MIB, 256 * _MIB
_SHM_NODE_WANTED = _GIB
# The agent's own open files, as in `preflight.check_open_files`; and what a data loader's tensors take beside them.
_FILES_WORKER, _FILES_AGENT = 5, 64
_FILES_WORKER_WANTED, _FILES_WANTED = 128, 512
_FILES_PLENTY = 65536
# Threads of one worker: OpenMP, NCCL, gloo, autograd, data loaders.
_THREADS_MIN, _THREADS_WANTED, _THREADS_AGENT = 32, 256, 64
_STACK_MIN = _MIB
# torch takes 0.4 GiB before the first tensor.
_MEMORY_MIN, _MEMORY_WANTED = _GIB // 2, 2 * _GIB
_SWAP_USED_MAX = _GIB
_DISK_MIN, _DISK_WANTED = 64 * _MIB, _GIB
_FILES_FREE_MIN = 100
_SLOW_WRITE_S = 2.0
_BUSY_LOAD = 0.5
# The oldest that elaunch is tried with.
_KERNEL_MIN = (5, 3)
_CLOCK_ERROR_MAX_S = 1.0


def judge_system(facts: SystemFacts, _needs: Needs) -> tuple[Finding, ...]:
    words = f"elaunch {facts.elaunch}, Python {facts.python} ({facts.executable}), Linux {facts.kernel}"
    found = [ok(words + (f"; {facts.scheduler}" if facts.scheduler else ""))]
    release = tuple(int(part) for part in facts.kernel.split("-")[0].split(".")[:2] if part.isdigit())
    if len(release) == 2 and release < _KERNEL_MIN:
        found = [bad(f"Linux {facts.kernel} is too old", "elaunch needs Linux 5.3 or newer")]
    if facts.program_trouble:
        found.append(bad(facts.program_trouble, "a job with these options ends at once with this sentence"))
    return tuple(found)


def judge_limits(facts: LimitFacts, needs: Needs) -> tuple[Finding, ...]:
    return (*_open_files(facts, needs), *_processes(facts, needs), *_stack(facts))


def _open_files(facts: LimitFacts, needs: Needs) -> tuple[Finding, ...]:
    limit = facts.open_files
    least = _FILES_WORKER * needs.workers + _FILES_AGENT
    wanted = _FILES_WORKER_WANTED * needs.workers + _FILES_WANTED
    text = f"the limit of open files (ulimit -n) is {limit}"
    if limit != NO_LIMIT and limit < least:
        return (bad(f"{text}, and {_need(needs)} {least}", _raise_files(facts, wanted)),)
    if limit != NO_LIMIT and limit < wanted:
        advice = _raise_files(facts, wanted)
        return (warn(f"{text}: data loaders that share tensors may need {wanted}", advice),)
    return (ok(f"open files: {_limit(limit)}"),)


def _raise_files(facts: LimitFacts, wanted: int) -> str:
    plenty, hard = max(wanted, _FILES_PLENTY), facts.open_files_hard
    if hard == NO_LIMIT or hard >= plenty:
        return f"ulimit -n {plenty}"
    return f"ulimit -n {hard}" if hard >= wanted else f"ulimit -n {wanted}, by root: the hard limit is {hard}"


def _processes(facts: LimitFacts, needs: Needs) -> tuple[Finding, ...]:
    limit = facts.processes
    if limit == NO_LIMIT or facts.is_exempt:
        return (ok(f"processes and threads: {_limit(limit)}{'' if limit == NO_LIMIT else ', not for root'}"),)
    least, wanted = (count * needs.workers + _THREADS_AGENT for count in (_THREADS_MIN, _THREADS_WANTED))
    text = f"the limit of this user's threads (ulimit -u) is {limit}"
    if limit < least:
        return (bad(f"{text}, and {_need(needs)} {least}", f"ulimit -u {wanted}, or ask root"),)
    if limit < wanted:
        return (warn(f"{text}; {_workers(needs)} may need {wanted}", f"ulimit -u {wanted}, or ask root"),)
    return (ok(f"processes and threads: {limit}"),)


def _stack(facts: LimitFacts) -> tuple[Finding, ...]:
    if facts.stack == NO_LIMIT or facts.stack >= _STACK_MIN:
        return ()
    return (
        warn(
            f"the limit of a stack (ulimit -s) is {bytes_text(facts.stack)}: a deep recursion crashes", "ulimit -s 8192"
        ),
    )


def judge_memory(facts: MemoryFacts, needs: Needs) -> tuple[Finding, ...]:
    free, of = facts.available, f"of {bytes_text(facts.total)}"
    if facts.cgroup_free is not None and facts.cgroup_free < free:
        free, of = facts.cgroup_free, "below the cgroup's limit (memory.max)"
    text = f"{bytes_text(free)} of memory are free, {of}"
    found = ok(text)
    if free < _MEMORY_MIN * needs.workers:
        found = bad(
            f"{text}, and {_need(needs)} {bytes_text(_MEMORY_MIN * needs.workers)} before the first tensor",
            "end what uses it (top -o %MEM), ask the scheduler for more, or start fewer workers",
        )
    elif free < _MEMORY_WANTED * needs.workers:
        found = warn(text, f"a worker with a data loader often needs {bytes_text(_MEMORY_WANTED)}; ask for more memory")
    more = []
    if facts.swap_used > _SWAP_USED_MAX:
        more.append(
            warn(
                f"{bytes_text(facts.swap_used)} are swapped out: steps stall", "end what uses the memory, or swapoff -a"
            )
        )
    if facts.overcommit == 2:
        more.append(
            warn(
                "vm.overcommit_memory is 2: CUDA and fork reserve far more than they use, and fail",
                "sysctl vm.overcommit_memory=0",
            )
        )
    return (found, *more)


def judge_cpu(facts: CpuFacts, needs: Needs) -> tuple[Finding, ...]:
    quota = "" if facts.quota is None else f", a quota of {facts.quota:g}"
    text = f"{_plural(facts.cpus, 'CPU')} ({_plural(facts.cores, 'core')}{quota})"
    if facts.quota is not None and facts.quota < needs.workers:
        return (
            warn(
                f"{text} for {_workers(needs)}: the kernel stops each of them for a part of the time",
                "raise cpu.max (in Kubernetes: limits.cpu), or start fewer workers",
            ),
        )
    if facts.cores < needs.workers:
        return (warn(f"{text} for {_workers(needs)}", "ask the scheduler for more cores, or start fewer workers"),)
    if facts.load > facts.cpus * (1 + _BUSY_LOAD):
        return (
            warn(
                f"{text}, and {facts.load:.0f} processes want to run on them (load of the last minute)",
                "end what uses them (top), or take another node",
            ),
        )
    return (ok(f"{text}, load {facts.load:.1f}"),)


def judge_shm(facts: DiskFacts, needs: Needs) -> tuple[Finding, ...]:
    (place,) = facts.places
    grow = "mount -o remount,size=16G /dev/shm; docker run --shm-size 16g; in a pod an emptyDir with medium Memory"
    if place.error:
        return (bad(f"nothing can be written to {place.path}: {place.error}", f"make it writable; {grow}"),)
    text = f"{bytes_text(place.free)} of {bytes_text(place.total)} are free in {place.path}"
    least, wanted = _SHM_MIN * needs.workers, max(_SHM_WANTED * needs.workers, _SHM_NODE_WANTED)
    if place.free < least:
        return (bad(f"{text}; {_need(needs)} {bytes_text(least)}, or a bus error (SIGBUS) ends the job", grow),)
    if place.free < wanted:
        return (warn(f"{text}; data loaders and NCCL may need {bytes_text(wanted)}", grow),)
    return (ok(text),)


def judge_disk(facts: DiskFacts, _needs: Needs) -> tuple[Finding, ...]:
    return tuple(finding for place in facts.places for finding in _place(place))


# Without these nothing starts, or what a worker writes is lost.
_NEEDED = ("TMPDIR", "--log-dir")


def _place(place: PlaceFacts) -> tuple[Finding, ...]:
    where, is_needed = f"{place.name} {place.path}", place.name in _NEEDED
    other = f"make room or change its owner, or give another {place.name}" if is_needed else "change its owner"
    if place.error:
        text = f"nothing can be written to {where}: {place.error}"
        return (bad(text, other),) if is_needed else (warn(text, other),)
    if place.files_free is not None and place.files_free < _FILES_FREE_MIN:
        return (bad(f"{where} has room for {place.files_free} more files (df -i)", other),)
    text = f"{where}: {bytes_text(place.free)} free"
    if place.free < _DISK_MIN and is_needed:
        return (bad(text, other),)
    if place.free < _DISK_WANTED:
        return (warn(text, other),)
    if place.write_s is not None and place.write_s > _SLOW_WRITE_S:
        return (warn(f"{text}; writing 1 MiB took {span(place.write_s)}", "check that disk or file server"),)
    if place.is_noexec and place.name == "TMPDIR":
        return (warn(f"{text}; it is mounted noexec, so torch.compile fails there", "set TMPDIR to another folder"),)
    if place.name == "TMPDIR" and len(place.path) > TEMPORARY_MAX:
        text = f"{text}; its path has {len(place.path)} characters, too many for the sockets of DataLoader workers"
        return (warn(text, f"set TMPDIR to a folder of at most {TEMPORARY_MAX} characters"),)
    return (ok(text),)


def judge_cgroup(facts: CgroupFacts, needs: Needs) -> tuple[Finding, ...]:
    found = []
    least, wanted = (count * needs.workers + _THREADS_AGENT for count in (_THREADS_MIN, _THREADS_WANTED))
    if facts.pids_free is not None and facts.pids_free < wanted:
        text = f"the cgroup's limit (pids.max) leaves {_plural(facts.pids_free, 'thread')} for {_workers(needs)}"
        advice = f"raise it to {wanted} or more (in Kubernetes: the kubelet's podPidsLimit)"
        found.append(bad(text, advice) if facts.pids_free < least else warn(text, advice))
    if facts.error:
        found.append(
            warn(
                f"no cgroup can be made here ({facts.error}): a process that removes elaunch's marker from its"
                " environment outlives the job",
                "most programs need nothing; for others, let systemd or the container delegate the cgroup",
            )
        )
    return tuple(found) or (ok(f"cgroups can be made below {facts.path}"),)


def judge_stacks(facts: StackFacts, _needs: Needs) -> tuple[Finding, ...]:
    if not facts.tool:
        return (warn("py-spy is not installed: stacks of hung workers are not shown", "pip install py-spy"),)
    if not facts.error:
        return (ok(f"py-spy reads the stack of another process in {span(facts.seconds)}"),)
    why = f"py-spy cannot read another process's stack ({facts.error})"
    return (warn(why, tracing_advice(facts.ptrace_scope)),)


def judge_clock(facts: ClockFacts, needs: Needs) -> tuple[Finding, ...]:
    if facts.is_synchronised is None:
        return (ok("the kernel does not say whether this host's clock is synchronised"),)
    if needs.nodes_max == 1 and not facts.is_synchronised:
        return (ok("no service synchronises this host's clock; a job of one node does not need it"),)
    if not facts.is_synchronised:
        return (
            warn(
                "no service synchronises this host's clock: log lines of several nodes cannot be put in order",
                "start chrony or systemd-timesyncd on the host",
            ),
        )
    if facts.error_s is not None and facts.error_s > _CLOCK_ERROR_MAX_S:
        return (warn(f"this host's clock may be wrong by {span(facts.error_s)}", "check chrony (chronyc tracking)"),)
    return (ok(f"this host's clock is synchronised, to {span(facts.error_s or 0.0)}"),)


def _limit(number: int) -> str:
    return "no limit" if number == NO_LIMIT else str(number)


def _workers(needs: Needs) -> str:
    return _plural(needs.workers, "worker")


def _need(needs: Needs) -> str:
    return f"{_workers(needs)} need{'s' if needs.workers == 1 else ''}"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
