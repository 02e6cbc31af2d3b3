"""Finds out what the rules about causes ask: free space, files, GPU errors, limits.

Most of these may hang: a file system whose server is gone, a driver that has crashed. So a thread asks, and nobody
waits for it longer than the limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from elaunch.agent.diagnosis.causes.cause import (
    NO_FACTS,
    Facts,
    FullDisks,
    GpuErrors,
    IsThere,
    KillCounters,
    MemoryLimits,
    Question,
    Space,
    SpaceOf,
)
from elaunch.agent.diagnosis.causes.table import questions_about
from elaunch.agent.diagnosis.oom import KernelLog, are_counted, limit_text
from elaunch.agent.linux import start_thread
from elaunch.rendezvous.types import Failure


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """The module `pynvml` with NVML open until the block's end; None without the package or without a driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


_LIMIT_S = 2.0
# What needs no disk and no driver.
_OF_KERNEL = (KillCounters, MemoryLimits)
# How /proc/mounts writes spaces and the like.
_OCTAL = re.compile(r"\\(\d{3})")
# File systems that are on no device of their own, and that programs fill. Network ones have a colon: host:/path.
_WRITTEN_KINDS = ("tmpfs", "overlay", "lustre", "gpfs", "beegfs", "zfs", "btrfs", "ceph")


class Investigator:
    """Answers questions about failures on this host.

    `log` is the kernel's since before any worker started; `counters` are the files that count its kills.
    """

    def __init__(self, log: KernelLog, counters: Sequence[Path]) -> None:
        self._log = log
        self._counters = counters

    def look_into(self, failures: Mapping[int, Failure], found: Callable[[dict[int, Facts]], None]) -> None:
        """Call `found` with the facts about these failures, by local rank: now, or soon, in another thread."""
        asked = {local_rank: questions_about(failure) for local_rank, failure in failures.items()}
        if all(isinstance(question, _OF_KERNEL) for questions in asked.values() for question in questions):
            # As after each kill. A restart would wait for two threads.
            facts: dict[int, Facts] = {}
            self._look(asked, facts)
            found(facts)
        elif not start_thread(lambda: self._wait(asked, found), "elaunch-facts"):
            found({})

    def _wait(self, asked: Mapping[int, frozenset[Question]], found: Callable[[dict[int, Facts]], None]) -> None:
        facts: dict[int, Facts] = {}
        if look := start_thread(lambda: self._look(asked, facts), "elaunch-look"):
            look.join(_LIMIT_S)
        found(dict(facts))

    def _look(self, asked: Mapping[int, frozenset[Question]], facts: dict[int, Facts]) -> None:
        for local_rank, questions in asked.items():
            for question in sorted(questions, key=repr):
                # What was answered before another question hangs is not lost.
                with suppress(OSError, ValueError, IndexError):
                    facts[local_rank] = self._answered(facts.get(local_rank, NO_FACTS), question)

    def _answered(self, facts: Facts, question: Question) -> Facts:
        match question:
            case SpaceOf(path):
                return replace(facts, spaces={**facts.spaces, path: _space(path)})
            case FullDisks():
                return replace(facts, full=_full_disks())
            case IsThere(path):
                return replace(facts, there=facts.there | {path}) if os.path.isfile(path) else facts  # noqa: PTH113
            case GpuErrors():
                return replace(facts, gpu_errors=(*self._log.xids(), *_counted_errors()))
            case MemoryLimits():
                return replace(facts, memory_limit=limit_text().partition(",")[0])
            case KillCounters():
                return replace(facts, kills_are_counted=are_counted(self._counters))


def _space(path: str) -> Space:
    """The file system of `path`, or of the nearest folder above that is there."""
    where = os.path.abspath(path)  # noqa: PTH100
    while not os.path.lexists(where) and where != "/":
        where = os.path.dirname(where)  # noqa: PTH120
    said = os.statvfs(where)
    mount = os.path.realpath(where)
    while not os.path.ismount(mount):
        mount = os.path.dirname(mount)  # noqa: PTH120
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


def _counted_errors() -> tuple[str, ...]:
    """Errors of the hardware that the NVIDIA driver has counted since it was loaded. Empty without nvidia-ml-py."""
    with opened_nvml() as nvml:
        if nvml is None:
            return ()
        try:
            return tuple(line for index in range(nvml.nvmlDeviceGetCount()) for line in _errors_of(nvml, index))
        except nvml.NVMLError as error:
            return (f"NVML cannot count the GPUs: {error}",)


def _errors_of(nvml: Any, index: int) -> list[str]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return [f"GPU {index} does not answer: {error}"]
    lines: list[str] = []
    with suppress(nvml.NVMLError):
        count = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if count:
            lines.append(f"GPU {index} has {count} uncorrectable ECC errors")
    with suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed:
            lines.append(f"GPU {index} could not remap a faulty row of its memory")
        elif is_pending:
            lines.append(f"GPU {index} waits for a reset to remap a faulty row of its memory")
    return lines
