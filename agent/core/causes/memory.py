"""Causes: no memory, on the host, on a GPU or in /dev/shm."""

from __future__ import annotations

import re

from elaunch.agent.core.causes.cause import (
    SHARED_MEMORY,
    CauseRule,
    Evidence,
    KernelKills,
    KillCounters,
    MemoryLimits,
    Question,
    SpaceOf,
    Values,
    regex,
)
from elaunch.agent.core.sizes import bytes_text

_SIGBUS, _SIGKILL = -7, -9
# Docker's default is 64 MiB. Such a small one is the cause of a bus error, even if its files are gone by now.
_SMALL_SHM = 256 << 20

_NO_MEMORY = (
    "the program asked for more memory than this host or its ulimit -v gives: use smaller batches or arrays, or give"
    " the job more memory"
)
# Also said of the processes of elaunch.
MORE_MEMORY = (
    "give the job more memory{limit}, or hold less in each rank: a smaller batch, fewer DataLoader workers, no copy of"
    " the data set in each rank"
)
_SENDERS = (
    "the scheduler (a limit of memory or time: sacct -j JOB, kubectl describe pod POD), a watchdog of the host"
    " (journalctl -u systemd-oomd), or a person (kill -9)"
)
# Only what a list of numbers has: with any character, hostile words would take a second.
_LOADER = r"DataLoader worker \(pid(?P<pids>(?:\(s\))?[\d, ]*)\)"
_SHM_ADVICE = (
    "give the container more shared memory (docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with"
    " medium: Memory at /dev/shm), or use fewer DataLoader workers"
)
# Semaphores, shared memory of Python and torch, and NCCL's segments. sem_open and shm_open give names below /dev/shm.
_SHM_WORDS = regex(r"/dev/shm\b|shared memory|</?torch_|semaphore|: '/(?:psm_|torch_|sem\.|mp-|wnsm_)")
_SHM_FILES = regex(r"(?:multiprocess(?:ing)?|loky/backend)/(?:synchronize|shared_memory|heap)\.py$")


def _ask_shm(_evidence: Evidence, _values: Values) -> tuple[Question, ...]:
    return (SpaceOf(SHARED_MEMORY),)


def _ask_limits(_evidence: Evidence, _values: Values) -> tuple[Question, ...]:
    return (MemoryLimits(),)


def _small_shm(evidence: Evidence, _values: Values) -> Values | None:
    """The rule is for a shared memory that is full, or so small that it must have been."""
    space = evidence.facts.spaces.get(SHARED_MEMORY)
    if space is None or (space.total > _SMALL_SHM and not space.is_full):
        return None
    return {"size": bytes_text(space.total), "free": bytes_text(space.free)}


def _is_in_shm(evidence: Evidence) -> bool:
    """Whether the file was to be made in /dev/shm, of which the words need not tell; other files are on a disk."""
    innermost = evidence.files[-1] if evidence.files else ""
    return bool(_SHM_WORDS.search(evidence.words) or _SHM_FILES.search(innermost))


def _ask_no_shm(evidence: Evidence, values: Values) -> tuple[Question, ...]:
    return _ask_shm(evidence, values) if _is_in_shm(evidence) else ()


def _no_shm(evidence: Evidence, _values: Values) -> Values | None:
    if not _is_in_shm(evidence):
        return None
    space = evidence.facts.spaces.get(SHARED_MEMORY)
    lack = "room for more files" if space and space.is_without_files and not space.is_full else "room"
    size = f"/dev/shm has {bytes_text(space.total)} in all, {bytes_text(space.free)} free" if space else ""
    return {"lack": lack, "size": size}


def _killed(evidence: Evidence, _values: Values) -> Values | None:
    if not evidence.was_out_of_memory:
        return None
    limit = evidence.facts.memory_limit
    return {"limit": f" (its limit is {limit})" if limit else ""}


def _ask_counters(evidence: Evidence, _values: Values) -> tuple[Question, ...]:
    return (KillCounters(),) if evidence.has_no_sender else ()


def _sender(evidence: Evidence, _values: Values) -> Values | None:
    """Who may have sent it. Its own cgroup's counter would have said that it was the kernel."""
    if not evidence.has_no_sender:
        return None
    if evidence.facts.kills_are_counted:
        return {"who": f"the kernel's out-of-memory killer did not send it; look for another sender: {_SENDERS}"}
    kernel = "the kernel for lack of memory (dmesg -T | grep -i 'killed process' on that host)"
    return {"who": f"look for the sender: {kernel}, {_SENDERS}"}


def _ask_kills(_evidence: Evidence, values: Values) -> tuple[Question, ...]:
    pids = [int(pid) for pid in re.findall(r"\d{1,9}", values["pids"])]
    return (KernelKills(tuple(pids[:64])),)


def _loader_killed(evidence: Evidence, _values: Values) -> Values | None:
    return {} if evidence.facts.oom_killed else None


def _gpu(evidence: Evidence, values: Values) -> Values:
    """Whose fault a full GPU is: another process's, fragmentation's, or the program's own."""
    if other := regex(r"Process (\d+) has ([\d.]+ \wiB) memory in use").search(evidence.words):
        advice = (
            f"another process (pid {other[1]}) holds {other[2]} on that GPU: give each rank its own GPU"
            " (torch.cuda.set_device(int(os.environ['LOCAL_RANK']))), or end that process (nvidia-smi)"
        )
    elif _is_fragmented(evidence.words):
        advice = (
            "most of the free memory is reserved by PyTorch in pieces that are too small: set"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    else:
        advice = (
            "use a smaller micro-batch with gradient accumulation, activation checkpointing, or shard the model (FSDP)"
        )
    return {**values, "who": advice}


def _is_fragmented(words: str) -> bool:
    asked = regex(r"Tried to allocate ([\d.]+) (\wiB)").search(words)
    idle = regex(r"([\d.]+) (\wiB) is reserved by PyTorch but unallocated").search(words)
    if not asked or not idle:
        return False
    scale = {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20}
    wanted, unused = (float(m[1]) * scale.get(m[2], 0) for m in (asked, idle))
    return unused > wanted > 0


RULES = (
    CauseRule(
        "killed by the kernel's out-of-memory killer",
        MORE_MEMORY,
        codes=frozenset({_SIGKILL}),
        more=_killed,
        asks=_ask_limits,
    ),
    CauseRule(
        "killed by a SIGKILL of an unknown sender",
        "{who}",
        codes=frozenset({_SIGKILL}),
        more=_sender,
        asks=_ask_counters,
        shown=f"by what the kernel counts: look for the sender, which may be the kernel for lack of memory, {_SENDERS}",
    ),
    CauseRule(
        "a GPU is out of memory",
        "{who}",
        pattern=regex(r"(?:CUDA|HIP) out of memory"),
        more=_gpu,
        shown="by what the message says: give each rank its own GPU, or set"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use a smaller micro-batch, activation checkpointing or"
        " FSDP",
    ),
    CauseRule(
        "host memory cannot be allocated",
        _NO_MEMORY,
        pattern=regex(
            r"DefaultCPUAllocator: (?:can't|not enough memory)|Unable to allocate [\d.]+ \wiB|std::bad_alloc"
            r"|\[Errno 12\] Cannot allocate memory"
        ),
    ),
    CauseRule(
        "memory error of Python",
        _NO_MEMORY,
        exceptions=frozenset({"MemoryError"}),
    ),
    CauseRule(
        "too many memory maps",
        "raise the limit of memory maps (sysctl vm.max_map_count), or send fewer and larger tensors between processes",
        pattern=regex(r"unable to mmap [^\n]{0,200}Cannot allocate memory"),
    ),
    CauseRule(
        "a DataLoader worker has too little shared memory",
        _SHM_ADVICE,
        pattern=regex(
            rf"{_LOADER} is killed by signal: Bus error|out of shared memory"
            r"|unable to (?:mmap|allocate|write|resize) [^\n]{0,200}(?:shared memory|</?torch_)"
            r"|Error while creating shared memory segment"
        ),
        detail="/dev/shm has {size} in all, {free} free",
        more=_small_shm,
        asks=_ask_shm,
    ),
    CauseRule(
        "no room in /dev/shm",
        "make {lack} on /dev/shm, which semaphores and shared memory need: remove what ended programs have left there"
        " (ls -l /dev/shm), or " + _SHM_ADVICE,
        pattern=regex(r"No space left on device"),
        detail="{size}",
        more=_no_shm,
        asks=_ask_no_shm,
    ),
    CauseRule(
        "a DataLoader worker was killed for lack of memory",
        "use fewer DataLoader workers or a smaller batch, or give the job more memory",
        pattern=regex(rf"{_LOADER} (?:is killed by signal: Killed|exited unexpectedly)"),
        detail="the kernel has killed it for lack of memory",
        more=_loader_killed,
        asks=_ask_kills,
    ),
    CauseRule(
        "a DataLoader worker was killed",
        "somebody killed it, most often the kernel for lack of memory (dmesg says so): use fewer DataLoader workers or"
        " a smaller batch, or give the job more memory",
        pattern=regex(rf"{_LOADER} is killed by signal: Killed"),
    ),
    CauseRule(
        "a DataLoader worker crashed",
        "set num_workers=0 once: the data set's own code then runs in the rank, and shows where it crashes",
        pattern=regex(rf"{_LOADER} (?:is killed by signal: (?!Killed)|exited unexpectedly)"),
    ),
    CauseRule(
        "a bus error from a small /dev/shm",
        _SHM_ADVICE,
        codes=frozenset({_SIGBUS}),
        detail="/dev/shm has {size} in all, {free} free",
        more=_small_shm,
        asks=_ask_shm,
    ),
)
