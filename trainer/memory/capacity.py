"""How much memory copies may take: what the shared memory's file system has, and what the cgroups leave."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

# Training needs more memory later (a batch, a library's buffer), and the kernel OOM-kills beyond the limit.
SPARE_SHARE = 0.05
_PART_BYTES = 16 << 20
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Capacity:
    """`free` bytes, and which cgroup limits them; "" if the file system does.

    `limit` is a cgroup's limit, less what is to be left free; `used` counts what the kernel cannot reclaim.
    """

    free: int
    where: str
    limit: int = 0
    used: int = 0


def capacity_in(folder: Path) -> Capacity:
    """The capacity for more bytes in `folder`, which is in shared memory.

    Shared memory is charged to the cgroup of the process that writes it first. A file system without a limit of its own
    may have more than that cgroup may take.
    """
    found = os.statvfs(folder)
    capacities = [Capacity(found.f_bavail * found.f_frsize, ""), *cgroup_capacities()]
    return min(capacities, key=lambda capacity: capacity.free)


def allocate(descriptor: int, begin: int, end: int) -> None:
    """Allocate these bytes of a file in shared memory. Raises OSError if there is no space, naming the cgroup.

    In parts, with a check before each: the ranks of a node allocate at the same time, within one limit.
    """
    for at in range(begin, end, _PART_BYTES):
        length = min(_PART_BYTES, end - at)
        tightest = min(cgroup_capacities(), key=lambda capacity: capacity.free, default=None)
        if tightest is not None and tightest.free < length:
            raise OSError(errno.ENOMEM, f"{tightest.where} leaves {tightest.free / 1e6:,.1f} MB")
        os.posix_fallocate(descriptor, at, length)


def cgroup_capacities(own: str = "", root_v2: Path = _V2, root_v1: Path = _V1) -> list[Capacity]:
    """The capacity that this process's cgroup, and each one above it, leaves of its limit; none if there are no limits.

    `own` is the content of /proc/self/cgroup.
    """
    try:
        lines = (own or Path("/proc/self/cgroup").read_text()).splitlines()
    except OSError:
        return []
    capacities = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers:
            capacities += _capacities(root_v2, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            capacities += _capacities(root_v1, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return capacities


def machine_capacity(text: str = "") -> Capacity:
    """The capacity of this machine; `text` is the content of /proc/meminfo."""
    lines = (line.split() for line in (text or Path("/proc/meminfo").read_text()).splitlines())
    found = {fields[0].rstrip(":"): int(fields[1]) << 10 for fields in lines if len(fields) > 1}
    total, available = found["MemTotal"], found["MemAvailable"]
    most = int(total * (1 - SPARE_SHARE))
    return Capacity(max(0, available - (total - most)), f"the machine ({total / 1e6:,.1f} MB)", most, total - available)


def tightest_capacity() -> Capacity:
    """The capacity that a cgroup or the machine leaves to this process: the smallest one."""
    return min([*cgroup_capacities(), machine_capacity()], key=lambda capacity: capacity.free)


def shared_by(workers: int, capacity: Capacity) -> str:
    """What limits each of `workers` workers."""
    return f"{capacity.where}, for {workers} workers" if workers > 1 else capacity.where


def _capacities(root: Path, path: str, limit: str, usage: str, prefix: str) -> list[Capacity]:
    own = root / path.lstrip("/")
    # In a container the path may be the host's, and the root of what is mounted is the container's own cgroup.
    folders = [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    found = []
    for folder in folders:
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
            held = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            # The kernel reclaims this page cache before it kills. Shared memory is not part of it.
            cache = sum(int(held.get(f"{prefix}{kind}", 0)) for kind in ("inactive_file", "active_file"))
            limited, unreclaimable = int(int(most) * (1 - SPARE_SHARE)), max(0, used - cache)
            where = f"the cgroup {folder} ({limit} {int(most) / 1e6:,.1f} MB)"
            found.append(Capacity(max(0, limited - unreclaimable), where, limited, unreclaimable))
    return found
