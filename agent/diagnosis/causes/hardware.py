"""Causes: memory, GPUs, their driver, and CUDA."""

from __future__ import annotations

from elaunch.agent.diagnosis.causes.cause import CauseRule, Evidence, Values, regex
from elaunch.rendezvous.format import bytes_text
from elaunch.rendezvous.types import FailureKind

_SIGBUS, _SIGKILL = -7, -9
# Docker's default is 64 MiB. One this small is the cause of a bus error, even if its files have been removed since.
_SMALL_SHM = 256 << 20

_GPU_FULL = "(?:CUDA|HIP) out of memory"
_NO_MEMORY = (
    "the program requested more memory than this host or its ulimit -v allows: use smaller batches or arrays, or give"
    " the job more memory"
)
# Also the advice for the processes of elaunch.
MORE_MEMORY = (
    "give the job more memory{limit}, or hold less in each rank: a smaller batch, fewer DataLoader workers, no copy of"
    " the dataset in each rank"
)
_SENDERS = (
    "the scheduler (a limit of memory or time: sacct -j JOB, kubectl describe pod POD), a watchdog of the host"
    " (journalctl -u systemd-oomd), or a person (kill -9)"
)
# Only the characters of a list of numbers: with any character, a search in a hostile text would take a second.
_LOADER = r"DataLoader worker \(pid(?P<pids>(?:\(s\))?[\d, ]*)\)"
_SHM_ADVICE = (
    "give the container more shared memory (docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with"
    " medium: Memory at /dev/shm), or use fewer DataLoader workers"
)
# Semaphores and shared memory of Python and torch: their paths, if they have any, do not begin with /dev/shm.
_IN_SHM = regex(
    r"/dev/shm\b|shared memory|</?torch_|semaphore"
    r"|(?:multiprocess(?:ing)?|loky/backend)/(?:synchronize|shared_memory|heap)\.py"
)


def _small_shm(evidence: Evidence, _values: Values) -> Values | None:
    """Applies only to a /dev/shm that is full, or so small that it must have been."""
    space = evidence.facts.shm
    if space is None or (space.total > _SMALL_SHM and not space.is_full):
        return None
    return {"size": bytes_text(space.total), "free": bytes_text(space.free)}


def _full_shm(evidence: Evidence, _values: Values) -> Values | None:
    innermost = evidence.traceback[evidence.traceback.rfind("\n  File ") :]
    if not _IN_SHM.search(f"{innermost}\n{evidence.text}"):
        return None
    space = evidence.facts.shm
    return {"size": f"/dev/shm has {bytes_text(space.total)} in all, {bytes_text(space.free)} free" if space else ""}


def _killed(evidence: Evidence, _values: Values) -> Values | None:
    if evidence.killed is not FailureKind.OUT_OF_MEMORY:
        return None
    limit = evidence.facts.memory_limit
    return {"limit": f" (its limit is {limit})" if limit else ""}


MEMORY_RULES = (
    CauseRule("killed by the kernel's out-of-memory killer", MORE_MEMORY, codes=frozenset({_SIGKILL}), more=_killed),
    CauseRule(
        "killed by SIGKILL that the kernel did not send",
        f"the kernel's out-of-memory killer did not send it; find another sender: {_SENDERS}",
        codes=frozenset({_SIGKILL}),
        more=lambda evidence, _: {} if evidence.killed and evidence.facts.kills_are_counted else None,
    ),
    CauseRule(
        "killed by SIGKILL from an unknown sender",
        "find the sender: the kernel for lack of memory (dmesg -T | grep -i 'killed process' on that host),"
        f" {_SENDERS}",
        codes=frozenset({_SIGKILL}),
        more=lambda evidence, _: {} if evidence.killed else None,
    ),
    CauseRule(
        "a GPU is out of memory, of which another process holds a part",
        "another process (pid {other}) holds {held} on that GPU: give each rank its own GPU"
        " (torch.cuda.set_device(int(os.environ['LOCAL_RANK']))), or end that process (nvidia-smi)",
        pattern=rf"{_GPU_FULL}[^\n]{{0,300}}?Process (?P<other>\d+) has (?P<held>[\d.]+ \wiB) memory in use",
    ),
    CauseRule(
        "a GPU is out of memory",
        "use a smaller micro-batch with gradient accumulation, activation checkpointing, or shard the model (FSDP);"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, if much is reserved by PyTorch but unallocated",
        pattern=_GPU_FULL,
    ),
    CauseRule(
        "host memory cannot be allocated",
        _NO_MEMORY,
        pattern=(
            r"DefaultCPUAllocator: (?:can't|not enough memory)|Unable to allocate [\d.]+ \wiB|std::bad_alloc"
            r"|\[Errno 12\] Cannot allocate memory"
        ),
    ),
    CauseRule("MemoryError in Python", _NO_MEMORY, exceptions=frozenset({"MemoryError"})),
    CauseRule(
        "a DataLoader worker has too little shared memory",
        _SHM_ADVICE,
        pattern=(
            rf"{_LOADER} is killed by signal: Bus error|out of shared memory"
            r"|unable to (?:mmap|allocate|write|resize) [^\n]{0,200}(?:shared memory|</?torch_)"
            r"|Error while creating shared memory segment"
        ),
        detail="/dev/shm has {size} in all, {free} free",
        more=_small_shm,
        needs_disks=True,
    ),
    CauseRule(
        "/dev/shm is full",
        "make room on /dev/shm, which semaphores and shared memory need: remove what programs left there when they"
        " exited (ls -l /dev/shm), or " + _SHM_ADVICE,
        pattern=r"No space left on device",
        detail="{size}",
        more=_full_shm,
        needs_disks=True,
    ),
    CauseRule(
        "a DataLoader worker was killed",
        "most often the kernel killed it for lack of memory (see dmesg): use fewer DataLoader workers or a smaller"
        " batch, or give the job more memory",
        pattern=rf"{_LOADER} is killed by signal: Killed",
    ),
    CauseRule(
        "a DataLoader worker crashed",
        "set num_workers=0 once: the dataset's own code then runs in the rank, and shows where it crashes",
        pattern=rf"{_LOADER} (?:is killed by signal: (?!Killed)|exited unexpectedly)",
    ),
    CauseRule(
        "a bus error from a small /dev/shm",
        _SHM_ADVICE,
        codes=frozenset({_SIGBUS}),
        detail="/dev/shm has {size} in all, {free} free",
        more=_small_shm,
        needs_disks=True,
    ),
)


_CUDA = r"CUDA error: "
_BLOCKING = "run once with CUDA_LAUNCH_BLOCKING=1, which shows the Python line of the failing kernel"

# The hardware faults in NVIDIA's list of Xid errors, and their texts (docs.nvidia.com/deploy/xid-errors).
_HARDWARE_XIDS = {
    "48": "double bit ECC error",
    "62": "internal micro-controller halt",
    "63": "row remapping or page retirement",
    "64": "row remapping or page retirement failed",
    "74": "NVLink error",
    "79": "the GPU has fallen off the bus",
    "92": "high rate of single bit ECC errors",
    "94": "contained ECC error",
    "95": "uncontained ECC error",
    "119": "GSP timeout",
    "120": "GSP error",
}
_XID = regex(r"Xid \((?P<where>[^)]*)\): (?P<xid>\d+)")


def _hardware(evidence: Evidence, _values: Values) -> Values | None:
    """The first hardware error that the driver logged. Xids that a faulty program can cause too prove nothing."""
    for line in evidence.facts.gpu_errors:
        if (found := _XID.search(line)) and found["xid"] in _HARDWARE_XIDS:
            return {"error": f"Xid {found['xid']} on {found['where']}: {_HARDWARE_XIDS[found['xid']]}"}
    return None


GPU_RULES = (
    CauseRule(
        "a GPU or its link is faulty (Xid)",
        "take this node out of the job and have the GPU reset or replaced; see also nvidia-smi -q and the kernel log",
        pattern=rf"{_CUDA}|NCCL error|CUBLAS_STATUS|CUDNN_STATUS|ncclSystemError|ncclUnhandledCudaError",
        detail="the NVIDIA driver logged: {error}",
        more=_hardware,
    ),
    CauseRule(
        "device-side assert",
        f"an index is out of range in a GPU kernel, most often a label or token id that is too large; {_BLOCKING}",
        pattern=_CUDA + "device-side assert",
    ),
    CauseRule(
        "illegal memory access in a kernel",
        f"a GPU kernel read or wrote outside of its memory; {_BLOCKING}; compute-sanitizer finds the access",
        pattern=_CUDA + "(?:an illegal memory access|misaligned address|unspecified launch failure)",
    ),
    CauseRule(
        "invalid device ordinal",
        "a rank chose a GPU that this node does not have: choose by LOCAL_RANK, not by RANK, and start as many workers"
        " as there are GPUs (--nproc-per-node gpu)",
        pattern=_CUDA + "invalid device ordinal|Invalid device id",
    ),
    CauseRule(
        "no kernel image for this GPU",
        "this build of torch, or of an extension, has no code for this GPU: install one that is built for it"
        " (torch.cuda.get_arch_list() and torch.cuda.get_device_capability() show both)",
        pattern=_CUDA + "no kernel image",
    ),
    CauseRule(
        "the driver is too old",
        "update the NVIDIA driver of this node, or install a torch that is built for an older CUDA",
        pattern=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient for CUDA runtime version",
    ),
    CauseRule(
        "no GPU is visible",
        "this process sees no GPU: check nvidia-smi on this node, CUDA_VISIBLE_DEVICES, and that the container or the"
        " scheduler gives it GPUs (docker --gpus all, --gres=gpu:N)",
        pattern=r"No CUDA GPUs are available|no CUDA-capable device is detected|Found no NVIDIA driver",
    ),
    CauseRule(
        "torch has no CUDA",
        "this torch is built for CPUs only: install one with CUDA (pytorch.org/get-started)",
        pattern=r"Torch not compiled with CUDA enabled",
    ),
    CauseRule(
        "CUDA in a forked process",
        'CUDA cannot be used in a forked child: use multiprocessing_context="spawn" for the DataLoader, or keep CUDA'
        " out of the dataset",
        pattern=r"Cannot re-initialize CUDA in forked subprocess",
    ),
    CauseRule(
        "cuBLAS or cuDNN cannot start",
        f"the GPU's memory is nearly full, or an earlier kernel has failed; {_BLOCKING}",
        pattern=r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
    ),
)
