"""Checks of this host: shared memory, limits, and the clock."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

from elaunch.launcher.doctor.findings import Finding, Needs, bad, ok, span, warn
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
# Bits of capabilities(7): root in a container may have lost them.
_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 14, 21, 24
# adjtimex(2): the state of an unsynchronised clock, and the place of maxerror in struct timex on 64 bits.
_TIME_ERROR, _TIMEX_BYTES, _MAXERROR_AT = 5, 256, 24
_CLOCK_ERROR_MAX_S = 1.0

_GROW_SHM = "mount -o remount,size=16G /dev/shm; docker run --shm-size 16g; in a pod an emptyDir with medium Memory"


def check_shm(needs: Needs, path: str = "/dev/shm") -> tuple[Finding, ...]:
    """Whether NCCL and data loaders find room; without it a bus error ends the job."""
    try:
        known = os.statvfs(path)
    except OSError as error:
        return (bad(f"{path} cannot be used: {error.strerror}", _GROW_SHM),)
    free, total = known.f_bavail * known.f_frsize, known.f_blocks * known.f_frsize
    if not os.access(path, os.W_OK | os.X_OK):
        return (bad(f"nothing can be written to {path}", f"make it writable for user {os.geteuid()}"),)
    text = f"{bytes_text(free)} of {bytes_text(total)} are free in {path}"
    least, wanted = _SHM_MIN * needs.workers, max(_SHM_WANTED * needs.workers, _SHM_NODE_WANTED)
    if free < least:
        return (bad(f"{text}; {needs.need(bytes_text(least))}, or a bus error (SIGBUS) ends the job", _GROW_SHM),)
    if free < wanted:
        return (warn(f"{text}; data loaders and NCCL may need {bytes_text(wanted)}", _GROW_SHM),)
    return (ok(text),)


def check_limits(needs: Needs) -> tuple[Finding, ...]:
    files, hard = (_limit(number) for number in resource.getrlimit(resource.RLIMIT_NOFILE))
    threads = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    is_exempt = has_capability(_CAP_SYS_ADMIN) or has_capability(_CAP_SYS_RESOURCE)
    return (judge_files(files, hard, needs), judge_threads(sys.maxsize if is_exempt else threads, needs))


def judge_files(limit: int, hard: int, needs: Needs) -> Finding:
    """The finding about the limits of open files, `sys.maxsize` if there is none."""
    least = _FILES_WORKER * needs.workers + _FILES_AGENT
    wanted = _FILES_WORKER_WANTED * needs.workers + _FILES_WANTED
    way_out = f"ulimit -n {wanted}" + ("" if hard >= wanted else f", by root: the hard limit is {hard}")
    text = f"the limit of open files (ulimit -n) is {limit}"
    if limit < least:
        return bad(f"{text}, and {needs.need(str(least))}", way_out)
    if limit < wanted:
        return warn(f"{text}: data loaders that share tensors may need {wanted}", way_out)
    return ok(f"open files: {_shown(limit)}")


def judge_threads(limit: int, needs: Needs) -> Finding:
    """The finding about the limit of this user's threads, `sys.maxsize` if there is none."""
    least, wanted = (count * needs.workers + _THREADS_AGENT for count in (_THREADS_MIN, _THREADS_WANTED))
    text = f"the limit of this user's threads (ulimit -u) is {limit}"
    if limit < least:
        return bad(f"{text}, and {needs.need(str(least))}", f"ulimit -u {wanted}, or ask root")
    if limit < wanted:
        return warn(f"{text}, and {needs.need(str(wanted))}", f"ulimit -u {wanted}, or ask root")
    return ok(f"processes and threads: {_shown(limit)}")


def memlock_finding() -> Finding | None:
    """What is wrong with the limit of locked memory on a node with RDMA; None if nothing is."""
    limit = _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if limit >= _MEMLOCK_WANTED or has_capability(_CAP_IPC_LOCK):
        return None
    return warn(
        f"the limit of locked memory (ulimit -l) is {bytes_text(limit)}, and RDMA locks its buffers",
        "ulimit -l unlimited, in limits.conf or the scheduler's unit; docker run --ulimit memlock=-1",
    )


def _limit(number: int) -> int:
    return sys.maxsize if number == resource.RLIM_INFINITY else number


def _shown(limit: int) -> str:
    return "no limit" if limit == sys.maxsize else str(limit)


def has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def check_clock(needs: Needs) -> tuple[Finding, ...]:
    timex = (ctypes.c_char * _TIMEX_BYTES)()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    error_s = int.from_bytes(bytes(timex)[_MAXERROR_AT : _MAXERROR_AT + 8], "little") / 1e6
    if state < 0:
        return (ok("the kernel does not report whether this host's clock is synchronised"),)
    return (judge_clock(state != _TIME_ERROR, error_s, needs),)


def judge_clock(is_synchronised: bool, error_s: float, needs: Needs) -> Finding:
    """The finding about a clock that may be wrong by `error_s` seconds."""
    if not is_synchronised and needs.nodes_max == 1:
        return ok("no service synchronises this host's clock; a job of one node does not need it")
    if not is_synchronised:
        return warn(
            "no service synchronises this host's clock: log lines of several nodes cannot be put in order",
            "start chrony or systemd-timesyncd on the host",
        )
    if error_s > _CLOCK_ERROR_MAX_S:
        return warn(f"this host's clock may be wrong by {span(error_s)}", "check chrony (chronyc tracking)")
    return ok(f"this host's clock is synchronised, to {span(error_s)}")
