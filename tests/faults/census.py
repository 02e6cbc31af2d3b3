"""Counts what a process holds, so that a test can say that it holds no more than before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.processes import is_alive

# What the agent has open of each worker once a generation has run for some seconds, by kind. On a busy machine some
# generations of a storm do, and others do not.
OF_LONG_GENERATIONS = ("/proc//stat", "/proc//schedstat")


@dataclass(frozen=True)
class Holdings:
    """What one process holds: its descriptors by kind, its threads and its zombies."""

    fds: tuple[tuple[str, int], ...]
    threads: int
    zombies: int

    @property
    def of_long_generations(self) -> dict[str, int]:
        return {kind: number for kind, number in self.fds if kind in OF_LONG_GENERATIONS}

    @property
    def of_each_generation(self) -> Holdings:
        return replace(self, fds=tuple(each for each in self.fds if each[0] not in OF_LONG_GENERATIONS))


def holdings(pid: int) -> Holdings:
    """What the process `pid` holds now."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            # All sockets ("socket:[4711]") are one kind, and all pipes. Each file is a kind of its own, but those of a
            # worker in /proc.
            kinds[re.sub(r":\[\d+\]$|(?<=^/proc/)\d+", "", str(link.readlink()))] += 1
    zombies = sum(_state(child) == "Z" for child in children(pid))
    return Holdings(tuple(sorted(kinds.items())), len(list(Path(f"/proc/{pid}/task").iterdir())), zombies)


def children(pid: int) -> list[int]:
    """The children of a single-threaded process in the order of their birth, zombies included."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command(pid: int) -> str:
    """The command line; empty where there is no such process any more."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def shared_memory_of(pids: Iterable[int]) -> list[str]:
    """The names in /dev/shm that belong to elaunch: those with its prefix, and those made by one of `pids`.

    The workers' memory is left out, since other tests' jobs have one too. `Watched.memory_dirs` has this job's own.
    """
    wanted = {str(pid) for pid in pids}
    names = [path.name for path in Path("/dev/shm").iterdir()]
    names = [name for name in names if not re.fullmatch(r"elaunch_[0-9a-f]+_memory", name)]
    return [name for name in names if name.startswith("elaunch") or wanted & set(re.split(r"[^0-9]+", name))]


def alive(pids: Iterable[int]) -> list[str]:
    """Those of `pids` that still run, with their command lines."""
    return [f"{pid} {command(pid)}" for pid in pids if is_alive(pid)]
