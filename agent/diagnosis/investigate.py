"""Finds out what the rules about causes need to know of this host: full disks, GPU errors, limits.

A file system whose server is gone may hang. So threads look, and nobody waits for them longer than the limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from elaunch.agent.diagnosis.causes.cause import SHARED_MEMORY, Facts, Space
from elaunch.agent.diagnosis.causes.table import wants_disks
from elaunch.agent.diagnosis.oom import KernelLog, limit_text
from elaunch.agent.linux import in_threads, start_thread
from elaunch.rendezvous.types import Failure

_LIMIT_S = 2.0
# File systems that are on no device of their own, and that programs fill. Network ones have a colon: host:/path.
_WRITTEN_KINDS = ("tmpfs", "overlay", "lustre", "gpfs", "beegfs", "zfs", "btrfs", "ceph")


def look_into(failures: Iterable[Failure], log: KernelLog, found: Callable[[Facts], None]) -> None:
    """Call `found` with what explains failures on this host: now, or soon, in another thread.

    `log` is the kernel's since before any worker started.
    """
    limit = limit_text().partition(",")[0]
    facts = Facts(gpu_errors=log.xids(), memory_limit=limit, kills_are_counted=log.counts_kills)
    # A restart after a kill does not wait for threads.
    if not any(map(wants_disks, failures)) or not start_thread(lambda: found(_with_disks(facts)), "elaunch-facts"):
        found(facts)


def _with_disks(facts: Facts) -> Facts:
    looks = {"shm": lambda: _spaces([SHARED_MEMORY]), "full": _full_disks}
    looked = in_threads(looks, _LIMIT_S, "elaunch-look")
    return replace(facts, shm=next(iter(looked.get("shm", ())), None), full=looked.get("full", ()))


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
    """The file systems that are mounted there, and can be asked."""
    found = []
    for mount in mounts:
        with suppress(OSError):
            said = os.statvfs(mount)
            # A file system without a fixed number of files says 0 of 0.
            files_free = said.f_favail if said.f_files else 1
            found.append(Space(mount, said.f_blocks * said.f_frsize, said.f_bavail * said.f_frsize, files_free))
    return tuple(found)
