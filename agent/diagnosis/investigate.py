"""Probes of this host that explain a failure or a wait: full disks, GPU errors, limits, folders, blocked ports.

A file system whose server is gone may hang. So threads read it, and they are not waited for longer than the limit.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from elaunch.agent.diagnosis.causes.cause import SHARED_MEMORY, Facts, Space
from elaunch.agent.diagnosis.causes.program import MISSING
from elaunch.agent.diagnosis.causes.table import wants_disks
from elaunch.agent.diagnosis.oom import KernelLog, limit_text
from elaunch.agent.linux import in_threads, start_thread
from elaunch.rendezvous.dial import Deadline, dial, is_silence, resolve
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.types import Failure

_LIMIT_S = 2.0
_DIAL_S = 2.0
REFUSED = "refused"
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# File systems that are on no device of their own, and that programs fill. Network ones have a colon: host:/path.
_WRITTEN_KINDS = ("tmpfs", "overlay", "lustre", "gpfs", "beegfs", "zfs", "btrfs", "ceph")


def gather_facts(failures: Iterable[Failure], log: KernelLog, found: Callable[[Facts], None]) -> None:
    """Call `found` with what explains failures on this host: now, or soon, in another thread.

    `log` is the kernel's since before any worker started.
    """
    limit = limit_text().partition(",")[0]
    facts = Facts(gpu_errors=log.xids(), memory_limit=limit, kills_are_counted=log.counts_kills)
    # A restart after a kill does not wait for threads.
    of_disks = [failure for failure in failures if wants_disks(failure)]
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
            # The root's folders are the system's, as /lib. A folder without Python code is data, as wandb's.
            found = (path for end in (".py", "/*.py", "/*/*.py") for path in folder.glob(name + end))
            if folder.parent != folder and _is_safe(folder) and any(map(_is_safe, found)):
                return str(folder)
    return ""


def _is_safe(path: Path) -> bool:
    """Whether only this user or root can have put it there: the code of other users is not advised for import."""
    with suppress(OSError):
        found = path.stat()
        is_shared = stat.S_ISDIR(found.st_mode) and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return found.st_uid in (os.geteuid(), 0) and not is_shared
    return False


def _full_disks() -> tuple[Space, ...]:
    """The file systems that can be written to, and that have no room for bytes or files; each once."""
    mounts = [
        each.mountpoint
        for each in psutil.disk_partitions(all=True)
        if not each.opts.startswith("ro")
        and (each.device.startswith("/") or each.fstype in _WRITTEN_KINDS or ":" in each.device)
    ]
    full = (space for space in _spaces(mounts) if space.is_full or space.is_without_files)
    found: dict[int, Space] = {}
    for space in full:
        with suppress(OSError):
            found.setdefault(Path(space.mount).stat().st_dev, space)
    return tuple(found.values())


def _spaces(mounts: Iterable[str]) -> tuple[Space, ...]:
    """The file systems that are mounted there, and can be queried."""
    found = []
    for mount in mounts:
        with suppress(OSError):
            status = os.statvfs(mount)
            # A file system without a fixed number of files reports 0 of 0.
            files_free = status.f_favail if status.f_files else 1
            found.append(Space(mount, status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize, files_free))
    return tuple(found)


def why_not(master: Endpoint) -> str:
    """Why no connection to that port is possible now; empty if one is, or if nothing is known. Waits for 2 s.

    A firewall may close the port, and ranks would wait for minutes.
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
        # Not this agent's own trouble, as too many open files: the worker may have none.
        return (error.strerror or str(error)).lower() if is_silence(error) else ""
    return ""


def kernels_ports() -> tuple[int, int]:
    """The first and the last of the ports that the kernel gives to gloo and NCCL."""
    with suppress(OSError, ValueError):
        first, last = map(int, _PORTS.read_text().split())
        return first, last
    return 32768, 60999


def unreachable_text(master: Endpoint, why: str) -> str:
    """The warning, with the ports that must be open."""
    first, last = kernels_ports()
    return (
        f"this node cannot connect to {master} ({why}), MASTER_PORT on the node of rank 0: a firewall? Ports to open"
        f" between all nodes: MASTER_PORT (--master-port FIRST:LAST limits it), and {first}-{last}, from which the"
        " kernel gives gloo and NCCL theirs; `elaunch doctor` with the options of this job tries them"
    )
