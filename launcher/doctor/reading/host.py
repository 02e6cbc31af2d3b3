"""Reads this host: limits, memory, CPUs, disks, cgroup and clock. No check needs a package of its own.

The health check at each start of a job needs a part of this, so that what the rest needs is imported there.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elaunch import __version__
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
    SystemFacts,
)
from elaunch.launcher.resources import detect, read_quota_cpus

SHM = "/dev/shm"
_WRITTEN_BYTES = 1 << 20
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE, _CAP_IPC_LOCK = 21, 24, 14
# adjtimex(2): the state of an unsynchronised clock, and the place of maxerror in struct timex on 64 bits.
_TIME_ERROR, _TIMEX_BYTES, _MAXERROR_AT = 5, 256, 24


def read_system(scheduler: str, program_trouble: str) -> SystemFacts:
    import platform
    import sys

    release = os.uname().release
    return SystemFacts(
        __version__, platform.python_version(), sys.executable, release, scheduler, program_trouble=program_trouble
    )


def read_limits() -> LimitFacts:
    open_files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    is_exempt = has_capability(_CAP_SYS_ADMIN) or has_capability(_CAP_SYS_RESOURCE)
    return LimitFacts(_limit(open_files), _limit(hard), _limit(processes), _limit(stack), is_exempt)


def read_memlock() -> tuple[int, bool]:
    """The limit of locked memory, and whether this process is free of it."""
    return _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]), has_capability(_CAP_IPC_LOCK)


def _limit(number: int) -> int:
    return NO_LIMIT if number == resource.RLIM_INFINITY else number


def has_capability(number: int) -> bool:
    for line in _text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def read_memory() -> MemoryFacts:
    fields: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return MemoryFacts(
        total=fields["MemTotal"],
        available=fields.get("MemAvailable", fields["MemFree"]),
        swap_used=fields.get("SwapTotal", 0) - fields.get("SwapFree", 0),
        cgroup_free=_least_free("memory.max", "memory.current"),
        overcommit=int(_text("/proc/sys/vm/overcommit_memory") or "0"),
    )


def read_cpu(environ: Mapping[str, str]) -> CpuFacts:
    host = detect(environ)
    return CpuFacts(host.cpus, host.cores, read_quota_cpus(), os.getloadavg()[0])


def read_shm() -> DiskFacts:
    return DiskFacts((read_place("shared memory", SHM, writes=True),))


def read_disks(needs: Needs, environ: Mapping[str, str]) -> DiskFacts:
    """The folders that workers write to. The current folder is only asked for its permissions."""
    home = Path(environ.get("HOME") or "/")
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    places = [
        read_temporary(environ),
        *([read_place("--log-dir", needs.log_dir, writes=True)] if needs.log_dir else []),
        read_place("the current folder", str(Path.cwd()), writes=False),
    ]
    if needs.uses_python:
        hub = environ.get("HF_HOME") or str(cache / "huggingface")
        torch = environ.get("TORCH_HOME") or str(cache / "torch")
        # A cache that is not used yet would be made below the same folder: one line is enough.
        found = {
            nearest(path): (name, path) for name, path in (("Hugging Face's cache", hub), ("torch's cache", torch))
        }
        places += [read_place(name, path, writes=False) for name, path in found.values()]
    return DiskFacts(tuple(places))


def read_temporary(environ: Mapping[str, str]) -> PlaceFacts:
    return read_place("TMPDIR", environ.get("TMPDIR") or "/tmp", writes=True)


def nearest(path: str) -> str:
    """The folder `path`, or the nearest above it that exists."""
    found = Path(path).absolute()
    return str(next((place for place in (found, *found.parents) if place.exists()), Path("/")))


def read_place(name: str, path: str, *, writes: bool) -> PlaceFacts:
    """What a folder has room for. With `writes` a file of 1 MiB is written there, if the folder itself exists."""
    folder = nearest(path)
    if not Path(folder).is_dir():
        return PlaceFacts(name, path, error=f"{folder} is a file")
    try:
        known = os.statvfs(folder)
    except OSError as error:
        return PlaceFacts(name, path, error=error.strerror or str(error))
    trouble, write_s = "", None
    if writes and folder == str(Path(path).absolute()):
        trouble, write_s = _written(folder)
    elif not os.access(folder, os.W_OK | os.X_OK):
        trouble = f"user {os.geteuid()} may not write there"
    return PlaceFacts(
        name,
        path,
        total=known.f_blocks * known.f_frsize,
        free=known.f_bavail * known.f_frsize,
        # File systems without a limit (btrfs, some network ones) say 0 of 0.
        files_free=known.f_favail if known.f_files else None,
        is_noexec=bool(known.f_flag & os.ST_NOEXEC),
        error=trouble,
        write_s=write_s,
    )


def _written(folder: str) -> tuple[str, float | None]:
    start_s = time.monotonic()
    try:
        with os.fdopen(_nameless(folder), "wb") as probe:
            probe.write(bytes(_WRITTEN_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.strerror or str(error), None
    return "", time.monotonic() - start_s


def _nameless(folder: str) -> int:
    """A new file without a name, as tempfile's, whose import takes longer than all else here."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    # This file system cannot do that (NFS, overlayfs of old kernels).
    name = Path(folder, f".elaunch-doctor-{os.urandom(8).hex()}")
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    name.unlink()
    return fd


def read_cgroup() -> CgroupFacts:
    from elaunch.agent.guardian.cgroup import JobCgroup, own_cgroup

    own = own_cgroup()
    if own is None:
        return CgroupFacts(error="there is no cgroup2 hierarchy", pids_free=_least_free("pids.max", "pids.current"))
    job = JobCgroup(f"elaunch_doctor_{os.getpid()}")
    job.make()
    error = ""
    if job.path:
        with suppress(OSError):
            Path(job.path).rmdir()
    else:
        error = "the kernel is older than 5.14" if os.access(own, os.W_OK) else f"{own} may not be written"
    return CgroupFacts(str(own), error, _least_free("pids.max", "pids.current"))


def _least_free(limit: str, used: str) -> int | None:
    """What the limits of this process's cgroup, and of those above it, leave of a resource; None without a limit."""
    from elaunch.agent.guardian.cgroup import own_cgroup

    own = own_cgroup()
    if own is None:
        return None
    free = []
    for folder in (own, *own.parents):
        most, now = _text(folder / limit), _text(folder / used)
        if most.isdigit() and now.isdigit():
            free.append(max(int(most) - int(now), 0))
    return min(free, default=None)


def read_clock() -> ClockFacts:
    import ctypes

    timex = (ctypes.c_char * _TIMEX_BYTES)()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return ClockFacts()
    maxerror_us = int.from_bytes(bytes(timex)[_MAXERROR_AT : _MAXERROR_AT + 8], "little")
    return ClockFacts(state != _TIME_ERROR, maxerror_us / 1e6)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
