"""Finds out what the rules about causes need to know of this host: full disks, GPU errors, limits.

A file system whose server is gone may hang. So a thread looks, and nobody waits for it longer than the limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elaunch.agent.diagnosis.causes.cause import Facts, Space
from elaunch.agent.diagnosis.causes.table import wants_disks
from elaunch.agent.diagnosis.oom import KernelLog, are_counted, limit_text
from elaunch.agent.linux import start_thread
from elaunch.rendezvous.types import Failure

_LIMIT_S = 2.0
_SHARED_MEMORY = "/dev/shm"
# How /proc/mounts writes spaces and the like.
_OCTAL = re.compile(r"\\(\d{3})")
# File systems that are on no device of their own, and that programs fill. Network ones have a colon: host:/path.
_WRITTEN_KINDS = ("tmpfs", "overlay", "lustre", "gpfs", "beegfs", "zfs", "btrfs", "ceph")


class Investigator:
    """Finds out on this host what explains failures.

    `log` is the kernel's since before any worker started; `counters` are the files that count its kills.
    """

    def __init__(self, log: KernelLog, counters: Sequence[Path]) -> None:
        self._log = log
        self._counters = counters

    def look_into(self, failures: Iterable[Failure], found: Callable[[Facts], None]) -> None:
        """Call `found` with what was found out: now, or soon, in another thread."""
        limit = limit_text().partition(",")[0]
        facts = Facts(gpu_errors=self._log.xids(), memory_limit=limit, kills_are_counted=are_counted(self._counters))
        # A restart after a kill does not wait for two threads.
        if not any(map(wants_disks, failures)) or not start_thread(lambda: _wait(facts, found), "elaunch-facts"):
            found(facts)


def _wait(facts: Facts, found: Callable[[Facts], None]) -> None:
    known = [facts]
    if look := start_thread(lambda: _look(known), "elaunch-look"):
        look.join(_LIMIT_S)
    found(known[-1])


def _look(known: list[Facts]) -> None:
    # What was found out before something hangs is not lost.
    with suppress(OSError):
        known.append(replace(known[-1], shm=_space(_SHARED_MEMORY)))
    with suppress(OSError, ValueError):
        known.append(replace(known[-1], full=_full_disks()))


def _space(mount: str) -> Space:
    """The file system that is mounted there."""
    said = os.statvfs(mount)
    # A file system without a fixed number of files says 0 of 0.
    files_free = said.f_favail if said.f_files else 1
    return Space(mount, said.f_blocks * said.f_frsize, said.f_bavail * said.f_frsize, files_free)


def _full_disks() -> tuple[Space, ...]:
    """The file systems that can be written to, and that have no room for bytes or files; each once."""

    found: dict[int, Space] = {}
    for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
        device, mount, kind, options, *_ = line.split()
        if options.split(",")[0] == "ro" or not (device.startswith("/") or kind in _WRITTEN_KINDS or ":" in device):
            continue
        with suppress(OSError):
            space = _space(_OCTAL.sub(lambda m: chr(int(m[1], 8)), mount))
            if space.is_full or space.is_without_files:
                found.setdefault(os.stat(space.mount).st_dev, space)  # noqa: PTH116
    return tuple(found.values())
