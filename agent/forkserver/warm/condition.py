"""What a process has from where it was started, and cannot take over from another process later.

A fork server that is used by another job than the one that began it must be equal to that job's agent in all of this.
"""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.guardian.guardian import JOB_VARIABLES

_CREDENTIALS = (
    "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Seccomp_filters", "CapInh", "CapPrm", "CapEff", "CapBnd",
    "CapAmb", "Mems_allowed_list", "THP_enabled",
)  # fmt: skip
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_FILES = ("personality", "coredump_filter", "timerslack_ns", "attr/current")
# Calls that libc has no function for, by their numbers (linux/arch/*/entry/syscalls).
_CALLS = {
    "x86_64": {"get_mempolicy": 239, "keyctl": 250, "ioprio_get": 252},
    "aarch64": {"get_mempolicy": 236, "keyctl": 219, "ioprio_get": 31},
}.get(os.uname().machine, {})
_KEYCTL_GET_KEYRING_ID, _KEY_SPEC_SESSION_KEYRING, _IOPRIO_WHO_PROCESS = 0, -3, 1
_NUMA_NODES_MAX = 1024
_SHOWN_MAX = 60


@dataclass(frozen=True)
class Fact:
    """One thing that must be equal, in words, and its value."""

    what: str
    value: str


def condition() -> tuple[Fact, ...]:
    """The facts of this process."""
    status = _status()
    names = [name for name in vars(resource) if name.startswith("RLIMIT_")]
    return (
        *(Fact(f"{name} in /proc/self/status", status.get(name, "")) for name in _CREDENTIALS),
        *(Fact(f"the {name} namespace", _link(f"/proc/self/ns/{name}")) for name in _NAMESPACES),
        Fact("the cgroup", _text("/proc/self/cgroup")),
        Fact("the root folder", _place("/")),
        *(Fact(f"the limit {name}", _limit(getattr(resource, name))) for name in sorted(names)),
        Fact("the CPUs", ",".join(map(str, sorted(os.sched_getaffinity(0))))),
        Fact("the nice value", str(os.getpriority(os.PRIO_PROCESS, 0))),
        Fact("the scheduling policy", f"{os.sched_getscheduler(0)}, {os.sched_getparam(0).sched_priority}"),
        Fact("the priority of its input and output (ionice)", _called("ioprio_get", _IOPRIO_WHO_PROCESS, 0)),
        Fact("the NUMA policy (numactl)", _numa_policy()),
        Fact("the session keyring", _called("keyctl", _KEYCTL_GET_KEYRING_ID, _KEY_SPEC_SESSION_KEYRING, 0)),
        *(Fact(f"{name} in /proc/self", _text(f"/proc/self/{name}")) for name in _FILES),
    )


def jobs(environment: dict[str, str]) -> tuple[Fact, ...]:
    """The scheduler's jobs of a process with that environment, by which the guardian tells jobs apart."""
    return tuple(Fact(f"{name} (a scheduler's job)", environment.get(name, "")) for name in JOB_VARIABLES)


def difference(there: tuple[Fact, ...], here: tuple[Fact, ...]) -> str:
    """A sentence about the first fact that is another one `here`; empty if all are equal."""
    known = {fact.what: fact.value for fact in there}
    for fact in here:
        was = known.get(fact.what, "")
        if was != fact.value:
            return f"{fact.what} is {_shown(fact.value)}, and was {_shown(was)}"
    return ""


def _shown(value: str) -> str:
    word = " ".join(value.split())
    return (word if len(word) <= _SHOWN_MAX else f"{word[:_SHOWN_MAX]}…") or "not set"


def _called(call: str, *args: object) -> str:
    """What a system call returns; empty where the kernel or a sandbox refuses it."""
    number = _CALLS.get(call)
    code = -1 if number is None else ctypes.CDLL(None).syscall(number, *args)
    return "" if code < 0 else str(code)


def _numa_policy() -> str:
    """The mode and the nodes of set_mempolicy(2)."""
    mode = ctypes.c_int()
    nodes = (ctypes.c_ulong * (_NUMA_NODES_MAX // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    size = ctypes.c_ulong(_NUMA_NODES_MAX)
    if not _called("get_mempolicy", ctypes.byref(mode), nodes, size, None, ctypes.c_ulong()):
        return ""
    number = int.from_bytes(bytes(nodes), "little")
    return f"{mode.value} of {','.join(str(node) for node in range(number.bit_length()) if number >> node & 1)}"


def _status() -> dict[str, str]:
    lines = (line.partition(":") for line in _text("/proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _limit(number: int) -> str:
    words = ("unlimited" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(number))
    return " of ".join(words)


def _place(path: str) -> str:
    status = os.stat(path)  # noqa: PTH116
    return f"{status.st_dev}:{status.st_ino}"


def _link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)  # noqa: PTH115
    return ""


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""
