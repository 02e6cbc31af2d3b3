"""What is read from a node, and what a job needs of it. Sizes are in bytes, times in seconds.

None means that this node does not tell. Limits of -1 mean: no limit.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_LIMIT = -1


@dataclass(frozen=True)
class Needs:
    """What the job with these options needs of this node.

    `workers` is their number here. `ports` are those that MASTER_PORT may be; empty for any. `uses_python` is false for
    a program that is a command. `wants_gpus` says that the user asked for one worker per GPU.
    """

    workers: int = 1
    nodes_max: int = 1
    ports: tuple[int, ...] = ()
    log_dir: str | None = None
    interpreter: str = ""
    uses_python: bool = True
    wants_gpus: bool = False


@dataclass(frozen=True)
class SystemFacts:
    elaunch: str
    python: str
    executable: str
    kernel: str
    scheduler: str = ""
    program_trouble: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """`error` is the last line of a failed import. `cuda_error` says why CUDA does not start.

    `peerless` counts the pairs of GPUs of which one cannot read the other's memory.
    """

    interpreter: str
    version: str = ""
    cuda: str = ""
    nccl: str = ""
    seconds: float = 0.0
    devices: int = 0
    error: str = ""
    cuda_error: str = ""
    pairs: int = 0
    peerless: int = 0


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str = ""
    memory: int | None = None


@dataclass(frozen=True)
class GpuState:
    """One NVIDIA GPU.

    `uncorrected` counts memory errors since the driver was loaded. `pending` says that pages or rows wait for a reset
    to be taken out of use; `remap_failed` that this did not work. `slows_at_c` is the temperature at which it slows
    down; `slowed_by` says why it does so now.
    """

    index: int
    name: str
    temperature_c: int | None = None
    slows_at_c: int | None = None
    slowed_by: str = ""
    uncorrected: int | None = None
    pending: bool | None = None
    remap_failed: bool | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class GpuFacts:
    """`source` is what told: nvml, nvidia-smi, or empty. `nodes` counts the GPUs whose device files may be opened.

    `visible` counts those of them that the variables leave. `trouble` says why the driver does not answer; without a
    source, why it cannot be asked.
    """

    source: str = ""
    driver: str = ""
    trouble: str = ""
    nodes: int = 0
    visible: int = 0
    vendor: str = ""
    gpus: tuple[GpuState, ...] = ()


@dataclass(frozen=True)
class XidEvent:
    """An error of a GPU in the kernel log."""

    age_s: float
    bus: str
    xid: int


@dataclass(frozen=True)
class KernelLogFacts:
    is_readable: bool
    xids: tuple[XidEvent, ...] = ()


@dataclass(frozen=True)
class RdmaFacts:
    """InfiniBand and RoCE ports as `device:port`, and their states."""

    ports: tuple[tuple[str, str], ...] = ()
    memlock: int = NO_LIMIT
    may_lock: bool = False


@dataclass(frozen=True)
class PlaceFacts:
    """A folder, or the nearest one above it that exists.

    `error` says why nothing can be written; `write_s` is how long a mebibyte took to reach the disk, None if none was
    written.
    """

    name: str
    path: str
    total: int = 0
    free: int = 0
    files_free: int | None = None
    is_noexec: bool = False
    error: str = ""
    write_s: float | None = None


@dataclass(frozen=True)
class DiskFacts:
    places: tuple[PlaceFacts, ...]


@dataclass(frozen=True)
class LimitFacts:
    open_files: int
    open_files_hard: int
    processes: int
    stack: int
    is_exempt: bool = False


@dataclass(frozen=True)
class MemoryFacts:
    """`cgroup_free` is what the memory limits of this process's cgroups leave."""

    total: int
    available: int
    swap_used: int = 0
    cgroup_free: int | None = None
    overcommit: int = 0


@dataclass(frozen=True)
class CpuFacts:
    cpus: int
    cores: int
    quota: float | None = None
    load: float = 0.0


@dataclass(frozen=True)
class CgroupFacts:
    """`error` says why no cgroup can be made. `pids_free` is what the limits of processes leave."""

    path: str = ""
    error: str = ""
    pids_free: int | None = None


@dataclass(frozen=True)
class StackFacts:
    """Whether py-spy can read a process's stack. `tool` is its path. `ptrace_scope` is the kernel's setting."""

    tool: str = ""
    error: str = ""
    ptrace_scope: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class ClockFacts:
    """The kernel's word on its clock: whether something keeps it, and by how much it may be wrong."""

    is_synchronised: bool | None = None
    error_s: float | None = None


@dataclass(frozen=True)
class NameFacts:
    """What a host's name resolves to, and how long that took."""

    name: str
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class NamesFacts:
    own: NameFacts
    endpoints: tuple[NameFacts, ...] = ()


@dataclass(frozen=True)
class AddressFacts:
    """This node's address for the others, and its interface.

    `gloo` is the interface that elaunch names to gloo, since gloo would not find it. `speed_mbps` is the interface's.
    """

    address: str = ""
    interface: str = ""
    speed_mbps: int | None = None
    gloo: str = ""
    error: str = ""


@dataclass(frozen=True)
class PortFacts:
    """`taken` are the wanted ports on which this node cannot listen. `ephemeral` are those of outgoing connections.

    `tried` are ports of `peer`, the endpoint's host, if that may be a node of the job. A host whose firewall lets them
    through answers, if only by a refusal; those in `silent` gave no answer, or `why`.
    """

    address: str = ""
    taken: tuple[int, ...] = ()
    error: str = ""
    ephemeral: tuple[int, int] = (0, 0)
    peer: str = ""
    tried: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class StoreFacts:
    """The job's store. `trouble` is `refused` by its host, `away`, `denied` to this node, or empty; `why` has words.

    `is_served` says that a node of the job serves the store if none runs, `is_head` that this node does so;
    `listen_error` says why it could not. The store's clock minus this node's is between `skew_from_s` and `skew_to_s`.
    """

    endpoint: str
    version: str = ""
    trouble: str = ""
    why: str = ""
    is_served: bool = False
    is_head: bool = False
    listen_error: str = ""
    latencies_s: tuple[float, ...] = ()
    skew_from_s: float | None = None
    skew_to_s: float | None = None
