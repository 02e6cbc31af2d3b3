"""Counts what a process holds, so that a test can say that it holds no more than before."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.faults.processes import Watched, is_alive
from tests.faults.sockets import sockets_of
from tests.harness import wait_for

# A closing pipe gets this long to disappear.
SETTLE_S = 20.0
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


def anonymous_kib(pid: int) -> int:
    """The memory that is the process's own, in KiB: neither files nor shared memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    assert match, text
    return int(match[1])


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


class Census:
    """Agent and fork server of a job at one moment of each generation, compared with the first such moment.

    `memory_kib` are their own memory at each count, agent and fork server.
    """

    def __init__(self, job: Watched) -> None:
        self._job = job
        self._pids = {"agent": job.process.pid, "fork server": job.fork_server().pid}
        self._first: dict[str, Holdings] = {}
        # The sockets at the last count, by inode, and when that was.
        self._known: dict[int, str] = {}
        self._files = 0
        self.memory_kib: list[tuple[int, int]] = []

    def count(self, workers: int, when: str) -> None:
        """Count, and fail if anything has grown. The job must be in the same state each time: all `workers` train."""
        assert self._job.fork_server().pid == self._pids["fork server"], "the fork server is another one"
        # It takes what its workers have sent about once a second.
        wait_for(lambda: self._recorders() == workers, "the agent's connections to the workers' recorders")
        if not self._first:
            wait_for(lambda: not any(h.zombies for h in self._holdings().values()), "zombies are reaped")
            self._first = self._holdings()
            self._files = self._temporary_files()
        now = self._settled(self._first)
        grown = f"{when}: more is held than at first:\n  first {self._first}\n  now   {now}"
        assert now == self._first, "\n".join((grown, *self._sockets(when)))
        self._sockets(when)
        late = holdings(self._pids["agent"]).of_long_generations
        assert all(number <= workers for number in late.values()), f"{when}: files of dead workers are open: {late}"
        files = self._temporary_files()
        assert files == self._files, f"{when}: {files} temporary files and folders, {self._files} at first"
        # The guardian, the fork server, the worker store.
        expected = workers + 3
        found = self._job.processes()
        assert len(found) == expected, f"{when}: {len(found)} processes, not {expected}: {_names(found)}"
        self.memory_kib.append((anonymous_kib(self._pids["agent"]), anonymous_kib(self._pids["fork server"])))

    def _sockets(self, when: str) -> list[str]:
        """The sockets of agent and fork server, and at which count each was seen first."""
        held = [(name, each) for name, pid in self._pids.items() for each in sockets_of(pid)]
        self._known = {each.inode: self._known.get(each.inode, when) for _, each in held}
        return [f"  {name}: {each} {command(each.maker)}; since {self._known[each.inode]}" for name, each in held]

    def _temporary_files(self) -> int:
        return len(list(self._job.tmp.rglob("*")))

    def _recorders(self) -> int:
        """How many of the agent's connections a worker has made."""
        agent = self._pids["agent"]
        return sum(each.maker not in (agent, 0) for each in sockets_of(agent))

    def _holdings(self) -> dict[str, Holdings]:
        return {name: holdings(pid).of_each_generation for name, pid in self._pids.items()}

    def _settled(self, wanted: dict[str, Holdings]) -> dict[str, Holdings]:
        with suppress(AssertionError):
            wait_for(lambda: self._holdings() == wanted, "the same as at first", SETTLE_S)
        return self._holdings()


def _names(processes: Iterable[psutil.Process]) -> list[str]:
    return [f"{p.pid} {command(p.pid)}" for p in processes]


def shared_memory_of(pids: Iterable[int]) -> list[str]:
    """The names in /dev/shm that belong to elaunch: those with its prefix, and those made by one of `pids`.

    The workers' memory is left out, since other tests' jobs have one too. `Watched.memory_dirs` has this job's own.
    """
    wanted = {str(pid) for pid in pids}
    names = [path.name for path in Path("/dev/shm").iterdir()]
    names = [name for name in names if not re.fullmatch(r"elaunch_[0-9a-f]+_memory", name)]
    return [name for name in names if name.startswith("elaunch") or wanted & set(re.split(r"[^0-9]+", name))]


def cgroups_named(word: str) -> list[str]:
    """The cgroups whose folder's name holds `word`."""
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if word in Path(folder).name]


def alive(pids: Iterable[int]) -> list[str]:
    """Those of `pids` that still run, with their command lines."""
    return [f"{pid} {command(pid)}" for pid in pids if is_alive(pid)]
