"""Ends every process of a job on this host, whoever its parent is now, and leaves nothing of it behind.

A process belongs to the job if it is in the job's cgroup, where there is one, or if its initial environment holds the
agent's marker. Workers inherit both, so do their children, through setsid and double forks, and so do nested agents'.

Run as `python -S guardian.py MARKER FD CGROUP RUN_DIR…` this file is the guardian, a process that outlives the agent
for a moment: when the pipe FD ends, because the agent closed it or died, it ends all of these and removes the run
directories. Before, it removes those of agents that were killed together with their guardians. Standard library only,
so that it is small and starts without the package.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

# The variable's name is in every worker's environment; its value lists the markers of all agents above it.
VARIABLE = "ELAUNCH_MARKER"
# A process in an uninterruptible sleep cannot be ended; it is waited for no longer than this.
SWEEP_S_MAX = 5.0
# How long a cgroup's processes may end by themselves: guardians of nested jobs, whose agents were swept before.
NESTED_S = 0.2
# Processes that remove what others have left in /dev/shm, when those are gone: Python's multiprocessing and torch have
# one each. They may do so for so long.
CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
CLEANERS_S = 0.5
# A run directory, and the file in it that its agent holds locked as long as it lives: with the host's boot id in it,
# since a disk that hosts share may keep each one's locks to itself.
RUN_DIR = re.compile(r"elaunch_[0-9a-f]{16}(_memory)?")
CLAIM = ".agent"


def clean_up(marker: str, cgroup: str, run_dirs: Iterable[str]) -> None:
    """Leave nothing of a job: its processes, its cgroup (a path, or empty), the run directories that there are."""
    sweep(marker)
    if cgroup:
        kill_cgroup(cgroup)
    for run_dir in run_dirs:
        shutil.rmtree(run_dir, ignore_errors=True)


def sweep(marker: str, spare: Collection[int] = (), meanwhile: Callable[[], None] = lambda: None) -> int:
    """SIGKILL all processes with `marker` but those in `spare`, until none is left; how many were ended.

    Those that clean up after the others are killed only if they do not end by themselves. `meanwhile` is called again
    and again while there is something to wait for.
    """
    ended: set[int] = set()
    start_s = now_s = time.monotonic()
    while (found := marked(marker, spare)) and now_s < start_s + SWEEP_S_MAX:
        patient = now_s < start_s + CLEANERS_S
        for pid in found:
            if not (patient and _is_cleaner(pid)) and _kill(pid, marker):
                ended.add(pid)
        meanwhile()
        # Killed processes leave /proc in their own time; a look every millisecond is soon enough.
        time.sleep(0.001)
        now_s = time.monotonic()
    return len(ended)


def marked(marker: str, spare: Collection[int] = ()) -> list[int]:
    """The pids of living processes (no zombies) with `marker`, without this process and those in `spare`."""
    needle = marker.encode()
    mine = {os.getpid(), *spare}
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [pid for pid in pids if pid not in mine and _holds(pid, needle)]


def kill_cgroup(path: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """SIGKILL all processes of the cgroup (v2) at `path` and below, wait until they are gone, and remove it.

    To be called after `sweep`: what a nested job's guardian has still to remove, only it knows.
    """
    with suppress(OSError):
        _wait_until_empty(path, NESTED_S, meanwhile)
        Path(path, "cgroup.kill").write_text("1")
        _wait_until_empty(path, SWEEP_S_MAX, meanwhile)
    for folder, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106


def _wait_until_empty(path: str, wait_s: float, meanwhile: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + wait_s
    while "populated 1" in Path(path, "cgroup.events").read_text() and time.monotonic() < deadline_s:
        meanwhile()
        time.sleep(0.0005)


def _holds(pid: int, needle: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    # A zombie's environment reads as empty.
    name = b"\0" + VARIABLE.encode() + b"="
    _, found, value = (b"\0" + environment).partition(name)
    return bool(found) and needle in value.partition(b"\0")[0]


def _is_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in CLEANERS)


def _kill(pid: int, marker: str) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The number may have gone to a stranger since it was listed; the pidfd cannot.
        if not _holds(pid, marker.encode()):
            return False
        with suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(pidfd)


def boot_id() -> bytes:
    """The same in all containers of a host until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def remove_abandoned(run_dirs: Iterable[str]) -> None:
    """Remove run directories of this user, where those in `run_dirs` are, whose agents are dead."""
    for parent in {os.path.dirname(run_dir) for run_dir in run_dirs}:  # noqa: PTH120
        with suppress(OSError):
            names = [name for name in os.listdir(parent) if RUN_DIR.fullmatch(name)]  # noqa: PTH208
            for name in names:
                _remove_if_abandoned(Path(parent, name))


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):
        # Kept open: where others may rename what is in a temporary folder, the name may soon be another folder's.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _remove_if_unlocked(folder, fd)
        finally:
            os.close(fd)


def _remove_if_unlocked(folder: Path, fd: int) -> None:
    found = os.fstat(fd)
    # Nobody else can have put anything into it.
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return
    claim = os.open(CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        # An error where its agent lives, or another guardian is at it.
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(claim, 64) == boot_id():
            _empty(Path(f"/proc/self/fd/{fd}"))
            folder.rmdir()
    finally:
        os.close(claim)


def _empty(folder: Path) -> None:
    """The claim last: what is interrupted is found again."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != CLAIM:
            path.unlink()
    (folder / CLAIM).unlink()


def main() -> None:
    """Wait for the agent's end, then clean up."""
    marker, fd, cgroup, run_dirs = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    # A scheduler's signals go to all of a job's processes; this one leaves when its work is done.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    # Gigabytes take seconds: meanwhile the agent may die.
    threading.Thread(target=remove_abandoned, args=(run_dirs,), daemon=True).start()
    while os.read(fd, 1):
        pass
    clean_up(marker, cgroup, run_dirs)


if __name__ == "__main__":
    main()
