"""Checks of this host: shared memory and limits."""

from __future__ import annotations

import os
import resource
import sys

from elaunch.launcher.doctor.findings import Finding, Needs, bad, ok, warn
from elaunch.rendezvous.texts import bytes_text

_MIB = 1 << 20
# A worker's share of /dev/shm: NCCL's segments take up to 10 MB for each channel and peer, a data loader's processes
# pass two batches each through it. Docker's default is 64 MiB for the whole container.
_SHM_MIN, _SHM_WANTED, _SHM_NODE_WANTED = 32 * _MIB, 256 * _MIB, 1024 * _MIB
# The agent's own open files, as in `preflight.check_open_files`; and what a data loader's tensors take beside them.
_FILES_WORKER, _FILES_AGENT = 6, 64
_FILES_WORKER_WANTED, _FILES_WANTED = 128, 512
# Threads of one worker: OpenMP, NCCL, gloo, autograd, data loaders.
_THREADS_MIN, _THREADS_WANTED, _THREADS_AGENT = 32, 256, 64
_MEMLOCK_WANTED = 1024 * _MIB

_GROW_SHM = "mount -o remount,size=16G /dev/shm; docker run --shm-size 16g; in a pod an emptyDir with medium Memory"


def check_shm(needs: Needs, path: str = "/dev/shm") -> tuple[Finding, ...]:
    """Whether NCCL and data loaders find room; without it a bus error ends the job."""
    if not os.access(path, os.W_OK | os.X_OK):
        return (bad(f"{path} cannot be used by user {os.geteuid()}", _GROW_SHM),)
    known = os.statvfs(path)
    free, total = known.f_bavail * known.f_frsize, known.f_blocks * known.f_frsize
    text = f"{bytes_text(free)} of {bytes_text(total)} are free in {path}"
    least, wanted = _SHM_MIN * needs.workers, max(_SHM_WANTED * needs.workers, _SHM_NODE_WANTED)
    if free < least:
        return (bad(f"{text}; {needs.need(bytes_text(least))}, or a bus error (SIGBUS) ends the job", _GROW_SHM),)
    if free < wanted:
        return (warn(f"{text}; data loaders and NCCL may need {bytes_text(wanted)}", _GROW_SHM),)
    return (ok(text),)


def check_limits(needs: Needs) -> tuple[Finding, ...]:
    """Whether the limits of open files and of threads are enough."""
    files = _soft(resource.RLIMIT_NOFILE)
    threads = sys.maxsize if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)
    return (judge_files(files, needs), judge_threads(threads, needs))


def judge_files(limit: int, needs: Needs) -> Finding:
    """The finding about the limit of open files, `sys.maxsize` if there is none."""
    least = _FILES_WORKER * needs.workers + _FILES_AGENT
    wanted = _FILES_WORKER_WANTED * needs.workers + _FILES_WANTED
    return _judge("open files (ulimit -n)", limit, least, wanted, needs)


def judge_threads(limit: int, needs: Needs) -> Finding:
    """The finding about the limit of this user's threads, `sys.maxsize` if there is none."""
    least, wanted = (count * needs.workers + _THREADS_AGENT for count in (_THREADS_MIN, _THREADS_WANTED))
    return _judge("this user's threads (ulimit -u)", limit, least, wanted, needs)


def _judge(what: str, limit: int, least: int, wanted: int, needs: Needs) -> Finding:
    text = f"the limit of {what} is {'none' if limit == sys.maxsize else limit}"
    if limit < least:
        return bad(f"{text}, and {needs.need(str(least))}", f"raise it to {wanted}")
    if limit < wanted:
        return warn(f"{text}: with data loaders {needs.need(str(wanted))}", f"raise it to {wanted}")
    return ok(text)


def memlock_finding() -> Finding | None:
    """What is wrong with the limit of locked memory on a node with RDMA; None if nothing is."""
    limit = _soft(resource.RLIMIT_MEMLOCK)
    if limit >= _MEMLOCK_WANTED or os.geteuid() == 0:
        return None
    return warn(
        f"the limit of locked memory (ulimit -l) is {bytes_text(limit)}, and RDMA locks its buffers",
        "ulimit -l unlimited, in limits.conf or the scheduler's unit; docker run --ulimit memlock=-1",
    )


def _soft(kind: int) -> int:
    limit = resource.getrlimit(kind)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
