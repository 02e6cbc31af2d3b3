"""Probes of this host that explain a failure or a wait.

The kernel log (kills for lack of memory, errors of the NVIDIA driver), the memory limit, full disks, folders of missing
modules, blocked ports. A file system whose server is gone may hang, so threads read it, and the wait for them has a
limit.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from elaunch.agent.diagnosis.causes.cause import SHARED_MEMORY, Facts, Space
from elaunch.agent.diagnosis.causes.program import MISSING
from elaunch.agent.diagnosis.causes.table import needs_disks
from elaunch.agent.linux import in_threads, start_thread, text_of
from elaunch.rendezvous.dial import Deadline, dial, is_silence, resolve
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.format import bytes_text
from elaunch.rendezvous.types import Failure

_LIMIT_S = 2.0
_DIAL_S = 2.0
REFUSED = "refused"
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Types of file systems that programs fill and that have no block device. Network ones have a colon: host:/path.
_WRITTEN_KINDS = ("tmpfs", "overlay", "lustre", "gpfs", "beegfs", "zfs", "btrfs", "ceph")
_ANONYMOUS = re.compile(r"anon-rss:(\d+)kB")
_SHARED = re.compile(r"shmem-rss:(\d+)kB")
_KILLED = re.compile(r"[Kk]illed process (\d+)")
_XID = "NVRM: Xid"
# A driver may repeat itself: the first lines are enough.
_XIDS_MAX = 32
_KILLS_MAX = 1024
# The exits of processes that the kernel killed together are observed within this time.
_CLAIM_S = 5.0
_V1_NAMES = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
# A larger limit means none: cgroup v1 then shows the largest number of pages.
_NO_LIMIT = 1 << 60


class KernelLog:
    """The kernel's messages and its counts of kills since this object was made. Thread-safe.

    There are no messages if this user may not read them. `counters` are the event files of this process's memory cgroup
    (v2 `memory.events`, v1 `memory.oom_control`).
    """

    def __init__(self, counters: Sequence[Path]) -> None:
        self._counters = counters
        self._counted = self.kills_counted() or 0
        self._claim_until_s = 0.0
        self._lock = threading.Lock()
        self._kills: dict[int, str] = {}
        self._xids: list[str] = []
        try:
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    def oom_text(self, pid: int, now_s: float) -> str:
        """A short text if the kernel killed `pid` for lack of memory, or may have done so. Else the empty string."""
        with self._lock:
            self._read()
            before, self._counted = self._counted, self.kills_counted() or 0
            if self._counted > before:
                # Several processes may have been killed at once.
                self._claim_until_s = now_s + _CLAIM_S
        if record := self._kills.get(pid):
            held = sum(int(m[1]) << 10 for pattern in (_ANONYMOUS, _SHARED) for m in [pattern.search(record)] if m)
            return "out of memory, per the kernel log" + (f"; it held {bytes_text(held)}" if held else "")
        return "its memory cgroup counted an out-of-memory kill at that time" if now_s < self._claim_until_s else ""

    def kills_counted(self) -> int | None:
        """The sum of the counters, which proves that there was no kill if it has not grown; None without a counter."""
        found = [count for path in self._counters if (count := _count(path)) is not None]
        return sum(found) if found else None

    def xids(self) -> tuple[str, ...]:
        """The driver's errors, oldest first, as in "Xid (PCI:0000:3b:00): 79, …"."""
        with self._lock:
            self._read()
            return tuple(self._xids)

    def _read(self) -> None:
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192).decode(errors="replace")
            except BrokenPipeError:
                # The kernel overwrote records before they were read. The next read begins at the oldest one left.
                continue
            except OSError:
                return
            if (killed := _KILLED.search(record)) and len(self._kills) < _KILLS_MAX:
                self._kills[int(killed[1])] = record
            _, found, rest = record.partition(_XID)
            if found and len(self._xids) < _XIDS_MAX:
                self._xids.append("Xid" + rest.partition("\n")[0])


def _count(path: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)", text_of(path), re.MULTILINE)
    return int(found[1]) if found else None


def limit_text() -> str:
    """The limit of this process's memory cgroup and its peak usage, as text. Empty without a limit."""
    for path in counter_files():
        names = ("memory.max", "memory.peak") if path.name == "memory.events" else _V1_NAMES
        limit, peak = (_number(path.with_name(name)) for name in names)
        if 0 < limit < _NO_LIMIT:
            return bytes_text(limit) + (f", of which {bytes_text(peak)} were used" if peak else "")
    return ""


def _number(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.isdecimal() else 0


def counter_files() -> list[Path]:
    """The event counters of this process's own memory cgroups."""
    found: list[str] = []
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append(f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            found.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return [path for path in map(Path, found) if path.exists()]


def gather_facts(failures: Iterable[Failure], log: KernelLog, found: Callable[[Facts], None]) -> None:
    """Call `found` with the facts that may explain `failures`: now, or soon, from another thread.

    `log` was opened before any worker started.
    """
    limit = limit_text().partition(",")[0]
    facts = Facts(gpu_errors=log.xids(), memory_limit=limit, kills_are_counted=log.kills_counted() is not None)
    # A restart after a kill does not wait for threads.
    of_disks = [failure for failure in failures if needs_disks(failure)]
    if not of_disks or not start_thread(lambda: found(_with_disks(facts, of_disks)), "elaunch-facts"):
        found(facts)


def _with_disks(facts: Facts, failures: Iterable[Failure]) -> Facts:
    probes: dict[str, Callable[[], Any]] = {
        "shm": lambda: next(iter(_spaces([SHARED_MEMORY])), None),
        "full": _full_disks,
        "folder": lambda: next(filter(None, map(_folder_of_missing, failures)), ""),
    }
    return replace(facts, **in_threads(probes, _LIMIT_S, "elaunch-probe"))


def _folder_of_missing(failure: Failure) -> str:
    """The current folder or one above a file of the traceback, if it has the module that is missing."""
    missing = re.search(MISSING, failure.message)
    if not missing:
        return ""
    name, here = missing["missing"].replace(".", "/"), Path.cwd()
    files = [file for file in re.findall(r'File "([^"<]+)"', failure.traceback) if "/lib/python3" not in file]
    with suppress(OSError, RuntimeError):
        for folder in dict.fromkeys((here, *(above for file in files for above in (here / file).resolve().parents))):
            # The root's folders are the system's, like /lib. A folder without Python code is data, like wandb's.
            found = (path for end in (".py", "/*.py", "/*/*.py") for path in folder.glob(name + end))
            if folder.parent != folder and _is_safe(folder) and any(map(_is_safe, found)):
                return str(folder)
    return ""


def _is_safe(path: Path) -> bool:
    """Whether only this user or root can have put it there: never advise importing other users' code."""
    with suppress(OSError):
        found = path.stat()
        is_shared = stat.S_ISDIR(found.st_mode) and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return found.st_uid in (os.geteuid(), 0) and not is_shared
    return False


def _full_disks() -> tuple[Space, ...]:
    """The writable file systems that are out of space or inodes; each once."""
    mounts = [
        each.mountpoint
        for each in psutil.disk_partitions(all=True)
        if not each.opts.startswith("ro")
        and (each.device.startswith("/") or each.fstype in _WRITTEN_KINDS or ":" in each.device)
    ]
    full = (space for space in _spaces(mounts) if space.is_full or space.is_out_of_inodes)
    found: dict[int, Space] = {}
    for space in full:
        with suppress(OSError):
            found.setdefault(Path(space.mount).stat().st_dev, space)
    return tuple(found.values())


def _spaces(mounts: Iterable[str]) -> tuple[Space, ...]:
    """The file systems that are mounted there, without those that fail to respond."""
    found = []
    for mount in mounts:
        with suppress(OSError):
            status = os.statvfs(mount)
            # A file system without a fixed number of files reports 0 of 0.
            files_free = status.f_favail if status.f_files else 1
            found.append(Space(mount, status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize, files_free))
    return tuple(found)


def connect_error(master: Endpoint) -> str:
    """Why no connection to that port is possible now; empty if one is, or if nothing is known. Takes up to 4 s.

    A firewall may block the port, and ranks would wait for minutes.
    """
    try:
        dial(resolve(master.host, master.port, _DIAL_S), Deadline(_DIAL_S).left).close()
    except socket.gaierror:
        return ""
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return "no answer"
    except OSError as error:
        # An error of this agent, such as too many open files, is left out: the worker may not have it.
        return (error.strerror or str(error)).lower() if is_silence(error) else ""
    return ""


def ephemeral_ports() -> tuple[int, int]:
    """The first and the last ephemeral port, which the kernel gives to gloo and NCCL."""
    with suppress(OSError, ValueError):
        first, last = map(int, _PORTS.read_text().split())
        return first, last
    return 32768, 60999


def unreachable_text(master: Endpoint, why: str) -> str:
    """The warning that MASTER_PORT is unreachable, with the ports that must be open."""
    first, last = ephemeral_ports()
    return (
        f"this node cannot connect to {master} ({why}), MASTER_PORT on the node of rank 0: a firewall? Ports to open"
        f" between all nodes: MASTER_PORT (--master-port FIRST:LAST limits it), and {first}-{last}, from which the"
        " kernel gives gloo and NCCL theirs; `elaunch doctor` with the options of this job tests them"
    )
