"""The CPUs, physical cores and GPUs that this process may use. They are read once, without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.terminal import can_move_cursor, is_one_terminal, terminal_size
from elaunch.agent.workers.gpus import read_gpus, visible


@dataclass(frozen=True)
class HostResources:
    """The resources of this host.

    `cpus` counts the logical CPUs in this process's affinity, `cores` the physical cores within its CPU quota.
    `columns` is the width of the terminal that shows this process's stdout and stderr, 0 without one.
    `python` is this process's interpreter. `python_options` are its options that workers inherit.
    """

    cpus: int
    cores: int
    gpus: int
    python: str
    python_options: tuple[str, ...] = ()
    columns: int = 0


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> HostResources:
    """Read the host's resources. Variables in `environ` may hide GPUs."""
    allowed = os.sched_getaffinity(0)
    return HostResources(
        cpus=len(allowed),
        cores=within_quota(physical_cores(allowed, _siblings(allowed, root)), read_quota_cpus(root)),
        gpus=len(visible(read_gpus(root), environ)),
        python=sys.executable,
        python_options=interpreter_options(sys.orig_argv[1:]),
        columns=terminal_size(1)[0] if is_one_terminal(1, 2) and can_move_cursor(1) else 0,
    )


def as_started(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the LC_CTYPE that this process was started with. In a C locale Python changes it (PEP 538)."""
    found = {name: value for name, value in environ.items() if name != "LC_CTYPE"}
    for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"LC_CTYPE="):
            found["LC_CTYPE"] = os.fsdecode(entry.partition(b"=")[2])
    return found


def interpreter_options(words: Sequence[str]) -> tuple[str, ...]:
    """The options in an interpreter's command line that workers inherit: -W, -X, -O, -B and -b.

    Options that isolate the interpreter (-E, -I, -P, -s, -S) are not inherited: installers write them into the first
    line of a command.
    """
    kept: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            # --check-hash-based-pycs MODE is the only long option that a program can follow.
            del rest[:1]
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "cm":
                return tuple(kept)
            if letter in "WX":
                kept += [f"-{letter}", letters or (rest.pop(0) if rest else "")]
                break
            if letter in "OBb":
                kept.append(f"-{letter}")
    return tuple(kept)


def physical_cores(allowed: Iterable[int], siblings: Mapping[int, str]) -> int:
    """The number of cores of the CPUs in `allowed`. `siblings` names each CPU's core, the same for its threads."""
    return len({siblings.get(cpu, str(cpu)) for cpu in allowed})


def within_quota(cores: int, quota_cpus: float | None) -> int:
    """At least one core, and no more than the container's quota."""
    return max(1, cores if quota_cpus is None else min(cores, int(quota_cpus)))


def read_quota_cpus(root: Path = Path("/")) -> float | None:
    """The lowest CPU limit of this process's cgroup (v1 or v2) and those above it; None without a limit."""
    limits: list[float] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ("cpu", "cpu,cpuacct", "cpuacct,cpu") if controllers else ("", "unified")
        for mount in mounts:
            base = root / "sys/fs/cgroup" / mount
            # If the container does not see its own path, the root of its mount is its cgroup.
            own = base / path.lstrip("/")
            folders = [own, *own.parents] if path else [base]
            limits += [
                limit
                for folder in folders
                if folder == base or base in folder.parents
                for limit in (_v1_limit(folder) if controllers else _v2_limit(folder),)
                if limit is not None
            ]
    return min(limits, default=None)


def _v2_limit(folder: Path) -> float | None:
    """The limit in `cpu.max`: "QUOTA PERIOD" in microseconds, or "max PERIOD" without a limit."""
    words = _text(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _v1_limit(folder: Path) -> float | None:
    """The limit of a v1 cgroup. A quota of -1 means no limit."""
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _siblings(cpus: Iterable[int], root: Path) -> dict[int, str]:
    found = {cpu: _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    return {cpu: text for cpu, text in found.items() if text}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
