"""Ends every process of a job on this host, whoever its parent is now, and leaves nothing of it behind.

A process belongs to the job if it is in the job's cgroup, where there is one, or if its initial environment holds the
agent's marker. Workers inherit both, so do their children, through setsid and double forks, and so do nested agents'.
A process that a worker lets a service start may hold the marker too: `sbatch`, `at` and `systemd-run` copy the
environment. Such a process is spared. It is in another job of the scheduler, or in a cgroup in which no worker starts.

With start_guardian.py this file is the guardian, a process that outlives the agent for a moment: when the pipe FD ends,
because the agent closed it or died, it ends all these processes and removes the run directories. Before that, it
removes the run directories and empty cgroups of agents that were killed together with their guardians. An agent that
ends in order says so; after any other end the guardian writes a line to the job's stderr, and an event to its timeline.
This file imports only the standard library, so that the guardian is small and starts without the package.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

# `typing` itself is slow to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The variable's name is in every worker's environment; its value lists the markers of all agents above it.
VARIABLE = "ELAUNCH_MARKER"
# The variable in the guardian's own environment with the run directories that it removes, as JSON.
RUN_DIRS = "ELAUNCH_RUN_DIRS"
# Each scheduler's id of a job, in the environment of that job's processes.
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "OAR_JOB_ID", "PJM_JOBID")
# Only this many bytes of an id are compared: an id of a megabyte does not fit into an argument of a program.
_ID_BYTES_MAX = 256
# The names of the two cgroup hierarchies in /proc/PID/cgroup.
_UNIFIED, _SYSTEMD = "", "name=systemd"
# The end of a job waits so long for what killed jobs have left. The next guardian removes the rest.
_REMOVAL_S = 0.2
# A process in an uninterruptible sleep cannot be ended. The sweep waits for it no longer than this.
SWEEP_S_MAX = 5.0
# A cgroup's processes have this long to end by themselves: they are guardians of nested jobs, whose agents are dead.
NESTED_S = 0.2
# Helper processes of Python's multiprocessing and of torch. They remove what dead processes have left in /dev/shm. One
# that rests for CLEANERS_S when these are gone waits for a stranger; one that takes so much CPU time has gone astray.
CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
CLEANERS_S = 0.5
_CLEANERS_CPU_S = 1.0
# A run directory, and the file in it that its agent keeps locked as long as it lives. The file holds the host's boot
# id, since on a disk that hosts share one host may not see another host's locks.
RUN_DIR = re.compile(r"elaunch_[0-9a-f]{16}(_memory|_socket)?")
CLAIM = ".agent"
# A job's cgroup, which its agent keeps locked as long as it lives.
JOB_CGROUP = re.compile(r"elaunch-[0-9a-f]{16}")
# A process's temporary folder, as Python's multiprocessing names it, and a socket in it. Data loaders have them.
_SOCKET_IN_FOLDER = re.compile(r"(/(?:.*/)?pymp-[a-z0-9_]{8})/[^/]+")
# Where agents' sockets are: all processes of a host find these folders, whatever their TMPDIR is.
SOCKET_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")


class Kin:
    """An agent's processes: those with `marker`, unless they are in another job, cgroup or container.

    `jobs` are the scheduler's ids of the agent's job (see `_id`), by variable. `cgroups` are the agent's own (see
    `_cgroups_of`), `namespace` is the agent's pid namespace.
    """

    def __init__(self, marker: str, jobs: Mapping[str, str], cgroups: Mapping[str, str], namespace: str) -> None:
        self.marker = marker
        self._needles = [marker.encode()]
        self._jobs = jobs
        self._cgroups = cgroups
        self._namespace = namespace

    @classmethod
    def of_this_process(cls, marker: str, environ: Mapping[str, str]) -> Kin:
        """The kin of an agent that runs in this process and whose workers inherit `environ`."""
        jobs = {name: _id(os.fsencode(environ[name])) for name in JOB_VARIABLES if environ.get(name)}
        return cls(marker, jobs, _cgroups_of("self"), _namespace_of("self"))

    @classmethod
    def read(cls, text: str) -> Kin:
        """The kin that `text()` has written."""
        return cls(*json.loads(text))

    def text(self) -> str:
        """The kin as text that another process can `read` from an argument. ASCII, whatever the scheduler's ids are."""
        return json.dumps((self.marker, self._jobs, self._cgroups, self._namespace))

    def with_commands(self) -> Kin:
        """This kin together with the commands that the agent runs beside the workers, which have `marker_beside`."""
        kin = Kin(self.marker, self._jobs, self._cgroups, self._namespace)
        kin._needles = [self.marker.encode(), marker_beside(self.marker).encode()]
        return kin

    def has(self, pid: int) -> bool:
        """Whether that process is one of the agent's."""
        try:
            # The environment of a zombie reads as empty.
            environment = _facts_of(pid, "environ")
        except OSError:
            return False
        if not any(needle in environment for needle in self._needles):
            return False
        # If a name is there twice, the first one counts.
        variables = dict(entry.partition(b"=")[::2] for entry in reversed(environment.split(b"\0")))
        mark = variables.get(VARIABLE.encode(), b"")
        if not any(needle in mark for needle in self._needles):
            return False
        jobs = {name: _id(variables.get(name.encode(), b"")) for name in JOB_VARIABLES}
        return not self.is_elsewhere(jobs, _cgroups_of(pid), _namespace_of(pid))

    def is_elsewhere(self, jobs: Mapping[str, str], cgroups: Mapping[str, str], namespace: str) -> bool:
        """Whether a process with `marker` and these facts of its own belongs to somebody else than the agent."""
        if any(job and job != self._jobs.get(name) for name, job in jobs.items()):
            return True
        if any(f"/elaunch-{self.marker}" in cgroup for cgroup in cgroups.values()):
            return False
        is_own_namespace = namespace in ("", self._namespace)
        return any(
            self._is_outside(own, cgroups.get(name, ""), is_own_namespace) for name, own in self._cgroups.items()
        )

    def _is_outside(self, own: str, cgroup: str, is_own_namespace: bool) -> bool:
        if not cgroup or cgroup == own:
            return False
        scope = _scope(own, self._jobs.values())
        if scope:
            return cgroup != scope and not cgroup.startswith(f"{scope}/")
        # The agent is in the root cgroup, so every cgroup of the host is below its own. A container has a cgroup and a
        # pid namespace of its own. A worker's child in a new pid namespace (bwrap, unshare) stays in its cgroup.
        return not is_own_namespace or cgroup.startswith("/../")


def marker_beside(marker: str) -> str:
    """The marker of commands that end with the agent, but not with a generation of workers."""
    return marker[::-1]


def _id(value: bytes) -> str:
    """A scheduler's id as two processes compare it, whatever their locales are."""
    return value[:_ID_BYTES_MAX].decode(errors="surrogateescape")


def _scope(cgroup: str, jobs: Iterable[str]) -> str:
    """The cgroup of the whole job of an agent that is in `cgroup`; empty for the root.

    Some schedulers make a cgroup for each step, in a cgroup of the job with the job's id in its name
    (`/slurm/job_12/step_0/task_0`). A process that a worker starts with `srun` is in another step of the same job.
    """
    parts = cgroup.rstrip("/").split("/")
    names = [re.compile(rf"(?<![0-9A-Za-z]){re.escape(job)}(?![0-9A-Za-z])") for job in jobs]
    for i, part in enumerate(parts):
        # Numbers in systemd's own names are those of users and sessions, not of jobs.
        if not part.endswith((".slice", ".scope", ".service")) and any(name.search(part) for name in names):
            return "/".join(parts[: i + 1])
    return "/".join(parts)


def _cgroups_of(pid: int | str) -> dict[str, str]:
    """The process's cgroups, by hierarchy, in the hierarchies where schedulers and systemd place jobs and units.

    These are the hierarchy of cgroup v2, and systemd's own if v1 is in use.
    """
    try:
        # The kernel ends a line only with a newline, which no cgroup's name has. `splitlines` would find other ends.
        lines = _facts_of(pid, "cgroup").decode(errors="surrogateescape").split("\n")
    except OSError:
        return {}
    named = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path for _, name, path in named if name in (_UNIFIED, _SYSTEMD)}


def _facts_of(pid: int | str, name: str) -> bytes:
    """The contents of the process's file of that name in /proc. Raises OSError where there is none any more."""
    # A restart waits until every process of the host was looked at: with `Path` that takes four times as long.
    with open(f"/proc/{pid}/{name}", "rb", 0) as file:  # noqa: PTH123
        return file.read()


def _namespace_of(pid: int | str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115
    except OSError:
        return ""


def clean_up(kin: Kin, cgroup: str, run_dirs: Iterable[str]) -> None:
    """End a job's processes, and remove its cgroup (a path, or empty) and those of its run directories that exist."""
    sweep(kin.with_commands())
    if cgroup:
        kill_cgroup(cgroup)
    for run_dir in run_dirs:
        _remove_own(run_dir)


def _remove_own(folder: str) -> None:
    """Remove a folder in a place that others can write to, if it is this user's. A link is not followed."""
    with suppress(OSError):
        if os.lstat(folder).st_uid == os.geteuid():
            _remove(folder)


def _remove(folder: str) -> None:
    # Imported here: the agent imports this module before a job's first worker, and has no use for that one then.
    from shutil import rmtree

    rmtree(folder, ignore_errors=True)


def sweep(kin: Kin, spare: Collection[int] = (), meanwhile: Callable[[], None] = lambda: None) -> int:
    """SIGKILL all of `kin` but those in `spare`, until none is left. Returns how many were ended.

    Helpers that clean up after other processes (`CLEANERS`) are killed only if they neither end nor get on with it.
    `meanwhile` is called again and again while there is something to wait for. The temporary folders in which they had
    sockets are removed: Python does that at its end, which a killed process does not reach.
    """
    ended: set[int] = set()
    seen: set[int] = set()
    theirs: dict[str, str] = {}
    busy: set[int] = set()
    cleaners = _Cleaners()
    start_s = now_s = time.monotonic()
    while (found := living(kin, spare)) and (now_s < start_s + SWEEP_S_MAX or busy.issuperset(found)):
        busy = cleaners.busy(found, now_s)
        if not seen.issuperset(found):
            theirs |= sockets_in_folders(set(found) - seen)
            seen.update(found)
        for pid in found:
            if pid not in busy and _kill(pid, kin):
                ended.add(pid)
        meanwhile()
        # Killed processes leave /proc in their own time; a look every millisecond is soon enough. One that
        # takes longer needs the CPU, and a look reads the environment of every process.
        time.sleep(0.001 if now_s < start_s + 0.1 else 0.01)
        now_s = time.monotonic()
    if theirs:
        remove_folders(theirs)
    return len(ended)


class _Cleaners:
    """Tells which of the helpers that clean up (`CLEANERS`) may go on: on a busy host they wait long for a CPU."""

    def __init__(self) -> None:
        # Of each the CPU time at the first look in clock ticks, its counters at the last one, and since when it rests.
        self._known: dict[int, tuple[int, list[str], float]] = {}

    def busy(self, found: Collection[int], now_s: float) -> set[int]:
        """Those of `found` that clean up, or wait for others of `found` to end."""
        cleaners = {pid for pid in found if is_cleaner(pid)}
        if len(cleaners) < len(found):
            self._known.clear()
        return {pid for pid in cleaners if self._is_busy(pid, now_s)}

    def _is_busy(self, pid: int, now_s: float) -> bool:
        try:
            counters = _facts_of(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
        except OSError:
            return True
        ticks = int(counters[11]) + int(counters[12])
        first, before, since_s = self._known.get(pid, (ticks, counters, now_s))
        if counters[0] == "R" or counters != before:
            since_s = now_s
        self._known[pid] = (first, counters, since_s)
        cpu_s = (ticks - first) / os.sysconf("SC_CLK_TCK")
        return now_s - since_s < CLEANERS_S and cpu_s < _CLEANERS_CPU_S


def sockets_in_folders(pids: Iterable[int]) -> dict[str, str]:
    """The sockets of these processes in temporary folders of Python's multiprocessing: the folders by inode."""
    found = all_sockets_in_folders()
    return {inode: found[inode] for pid in pids for inode in _socket_inodes(pid) & found.keys()} if found else {}


def all_sockets_in_folders() -> dict[str, str]:
    """The same for all processes of this host."""
    with suppress(OSError):
        text = Path("/proc/net/unix").read_bytes()
        # Most hosts have none, and this is on the way of a restart.
        if b"/pymp-" in text:
            lines = [line.split(None, 7) for line in text.decode(errors="surrogateescape").split("\n")]
            paths = {line[6]: _SOCKET_IN_FOLDER.fullmatch(line[7]) for line in lines if len(line) == 8}
            return {inode: match[1] for inode, match in paths.items() if match}
    return {}


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


def remove_folders(theirs: Mapping[str, str]) -> None:
    """Remove the folders of the sockets `theirs`, which nobody has any more, unless somebody else has one there too."""
    others = {folder for inode, folder in all_sockets_in_folders().items() if inode not in theirs}
    for folder in {*theirs.values()} - others:
        _remove_own(folder)


def living(kin: Kin, spare: Collection[int] = ()) -> list[int]:
    """The pids of `kin` that live (no zombies), without this process and those in `spare`."""
    mine = {os.getpid(), *spare}
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [pid for pid in pids if pid not in mine and kin.has(pid)]


def kill_cgroup(path: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """SIGKILL all processes of the cgroup (v2) at `path` and below, wait until they are gone, and remove it.

    Call it after `sweep`. The guardian of a nested job gets a little time first: only it knows what it has to remove.
    """
    with suppress(OSError):
        _wait_until_empty(path, NESTED_S, meanwhile)
        Path(path, "cgroup.kill").write_text("1")
        _wait_until_empty(path, SWEEP_S_MAX, meanwhile)
    _remove_cgroup(path)


def _remove_cgroup(path: str) -> None:
    """Remove the cgroup and those below it; the kernel keeps those that have a process."""
    for folder, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106


def _wait_until_empty(path: str, wait_s: float, meanwhile: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + wait_s
    while "populated 1" in Path(path, "cgroup.events").read_text() and time.monotonic() < deadline_s:
        meanwhile()
        time.sleep(0.0005)


def is_cleaner(pid: int) -> bool:
    """Whether it is a helper that cleans up after other processes."""
    try:
        command = _facts_of(pid, "cmdline")
    except OSError:
        return False
    return any(name in command for name in CLEANERS)


def _kill(pid: int, kin: Kin) -> bool:
    pidfd = -1
    with suppress(OSError, AttributeError):
        pidfd = os.pidfd_open(pid)
    try:
        # The pid may belong to a stranger since it was listed. The pidfd stands for one process: check that one.
        if not kin.has(pid):
            return False
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):
            # No pidfds: a container's seccomp profile, an old kernel or Python. The check was a moment ago.
            os.kill(pid, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def boot_id() -> bytes:
    """The host's boot id, which is the same in all its containers until the host starts again."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def remove_abandoned(run_dirs: Iterable[str]) -> None:
    """Remove this user's run directories whose agents are dead, from the folders in which `run_dirs` are."""
    for parent in {os.path.dirname(run_dir) for run_dir in run_dirs}:  # noqa: PTH120
        with suppress(OSError):
            names = [name for name in os.listdir(parent) if RUN_DIR.fullmatch(name)]  # noqa: PTH208
            for name in names:
                _remove_if_abandoned(Path(parent, name))


def remove_abandoned_cgroups(cgroup: str) -> None:
    """Remove this user's cgroups of jobs beside `cgroup` whose agents are dead, and in which no process is left."""
    parent = os.path.dirname(cgroup)  # noqa: PTH120
    with suppress(OSError):
        for name in os.listdir(parent):  # noqa: PTH208
            if JOB_CGROUP.fullmatch(name):
                with suppress(OSError):
                    _remove_cgroup_if_unlocked(f"{parent}/{name}")


def _remove_cgroup_if_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # This fails if the agent lives.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid == os.geteuid() and "populated 0" in Path(path, "cgroup.events").read_text():
            _remove_cgroup(path)
    finally:
        os.close(fd)


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):
        # The folder stays open: in a shared temporary folder others may rename it, and put another in its place.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _remove_if_unlocked(folder, fd)
        finally:
            os.close(fd)


def _remove_if_unlocked(folder: Path, fd: int) -> None:
    found = os.fstat(fd)
    # Go on only with a folder in which nobody but this user can have put anything.
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return
    claim = os.open(CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        # This fails if the folder's agent lives, or if another guardian removes the folder.
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(claim, 64) == boot_id():
            _empty(Path(f"/proc/self/fd/{fd}"))
            folder.rmdir()
    finally:
        os.close(claim)


def _empty(folder: Path) -> None:
    """Empty the folder, the claim last: after an interruption the next guardian finds the folder again."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove(str(path))
        elif path.name != CLAIM:
            path.unlink()
    (folder / CLAIM).unlink()


def _remove_what_killed_jobs_left(run_dirs: Iterable[str], cgroup: str) -> None:
    remove_abandoned_cgroups(cgroup)
    remove_abandoned(run_dirs)


def main(said: bytes = b"") -> None:
    """Wait for the agent's end, then clean up. `said` was read from the agent's pipe already."""
    # Not after the agent's end: Python's own files may be gone then.
    import importlib
    import shutil  # noqa: F401

    # A file beside this one: the guardian runs without the package.
    words = importlib.import_module("last_words")

    kin, fd, cgroup = Kin.read(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    notes: dict[str, Any] = {}
    kernel_log = words.open_kernel_log()
    run_dirs = json.loads(os.environ[RUN_DIRS])
    # In a thread, since removing gigabytes takes seconds, and the agent may die meanwhile.
    # Where the system gives no thread, the next agent's guardian removes them.
    remover = threading.Thread(target=_remove_what_killed_jobs_left, args=(run_dirs, cgroup), daemon=True)
    with suppress(RuntimeError):
        remover.start()
    while True:
        *lines, said = said.split(b"\n")
        for line in lines:
            # A note that did not fit into a full pipe was cut. The next one has all facts again.
            with suppress(ValueError):
                notes.update(json.loads(line))
        if not (piece := os.read(fd, 4096)):
            break
        said += piece
    clean_up(kin, cgroup, run_dirs)
    if "pid" in notes and not notes.get("is_over"):
        words.last_words(notes, int(sys.argv[4]), kernel_log)
    if remover.is_alive():
        # A job may be over before the removal has begun.
        remover.join(_REMOVAL_S)
