"""Kills every process of a job on this host, orphans too, and removes the job's run directories.

A process belongs to the job if its initial environment holds the agent's marker. Workers inherit it; so do their
children, through setsid and double forks, and those of nested agents. A process that a service starts for a worker may
hold the marker too: `sbatch`, `at` and `systemd-run` copy the environment. Such a process is spared: it is in another
job of the scheduler, or in another cgroup.

Run as `python -I -S -B guardian.py PROCESSES` this file is the guardian, a process that briefly outlives the
agent: when its stdin ends, because the agent closed it or died, it kills all these processes and removes the run
directories. Before that, it removes the run directories of agents that were killed together with their guardians. An
agent that exits normally reports it; after any other exit the guardian writes a line to stderr, and an event to the
timeline. This file imports only the standard library, so that the guardian is small and starts without the package.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

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
# A process in an uninterruptible sleep cannot be killed. The sweep waits for it no longer than this.
SWEEP_S_MAX = 5.0
# An exec that waits for a disk takes longer.
_EXEC_S_MAX = 0.5
# Helper processes of Python's multiprocessing and of torch. They remove what dead processes have left in /dev/shm, and
# have this long for that when all others have exited.
CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
CLEANERS_S = 1.0
# A run directory, and the file in it that its agent keeps locked as long as it lives. The file holds the host's boot
# id, since on a disk that hosts share one host may not see another host's locks.
RUN_DIR = re.compile(r"elaunch_[0-9a-f]{16}(_memory|_socket)?")
CLAIM = ".agent"
# The folders of agents' sockets: all processes of a host find them, whatever their TMPDIR is.
SOCKET_FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")
# The last line waits no longer than this for a stderr that is full.
_LAST_LINE_S = 1.0


class JobProcesses(NamedTuple):
    """An agent's processes: those with `marker`, unless they are in another job, cgroup or container.

    `jobs` are the scheduler's ids of the agent's job (see `_id`), by variable. `cgroups` are the agent's own (see
    `_cgroups_of`), `namespace` is the agent's pid namespace.
    """

    marker: str
    jobs: Mapping[str, str]
    cgroups: Mapping[str, str]
    namespace: str

    @classmethod
    def of_this_process(cls, marker: str, environ: Mapping[str, str]) -> JobProcesses:
        """Those of an agent that runs in this process and whose workers inherit `environ`."""
        jobs = {name: _id(os.fsencode(environ[name])) for name in JOB_VARIABLES if environ.get(name)}
        return cls(marker, jobs, _cgroups_of("self"), _namespace_of("self"))

    def has(self, pid: int, until_s: float = 0.0) -> bool:
        """Whether that process is one of the agent's. Waits until then for one in the middle of an exec."""
        environment, marker = _environment_of(pid, until_s), self.marker.encode()
        if marker not in environment:
            return False
        # If a name occurs twice, the first one counts.
        variables = dict(entry.partition(b"=")[::2] for entry in reversed(environment.split(b"\0")))
        if marker not in variables.get(VARIABLE.encode(), b""):
            return False
        jobs = {name: _id(variables.get(name.encode(), b"")) for name in JOB_VARIABLES}
        return not self.is_elsewhere(jobs, _cgroups_of(pid), _namespace_of(pid))

    def is_elsewhere(self, jobs: Mapping[str, str], cgroups: Mapping[str, str], namespace: str) -> bool:
        """Whether a process with `marker` and these facts of its own does not belong to the agent."""
        if any(job and job != self.jobs.get(name) for name, job in jobs.items()):
            return True
        is_own_namespace = namespace in ("", self.namespace)
        return any(self._is_outside(own, cgroups.get(name, ""), is_own_namespace) for name, own in self.cgroups.items())

    def _is_outside(self, own: str, cgroup: str, is_own_namespace: bool) -> bool:
        if not cgroup or cgroup == own:
            return False
        scope = _scope(own, self.jobs.values())
        if scope:
            return cgroup != scope and not cgroup.startswith(f"{scope}/")
        # The agent is in the root cgroup, so every cgroup of the host is below its own. A container has a cgroup and a
        # pid namespace of its own. A worker's child in a new pid namespace (bwrap, unshare) stays in its cgroup.
        return not is_own_namespace or cgroup.startswith("/../")


def _id(value: bytes) -> str:
    """A scheduler's id in a form that does not depend on the locale of the process that compares it."""
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
    # The kernel ends a line only with a newline, which no cgroup's name has. `splitlines` would find other ends.
    lines = _facts_of(pid, "cgroup").decode(errors="surrogateescape").split("\n")
    named = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path for _, name, path in named if name in (_UNIFIED, _SYSTEMD)}


def _facts_of(pid: int | str, name: str) -> bytes:
    """The contents of a process's file of that name in /proc; empty for a zombie, and where there is none any more."""
    # A restart waits until every process of the host was read: with `Path` that takes four times as long.
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb", 0) as file:  # noqa: PTH123
        return file.read()
    return b""


def _environment_of(pid: int, until_s: float) -> bytes:
    """The process's initial environment. During an exec there is none, for up to 24 ms on a busy host."""
    environment = _facts_of(pid, "environ")
    with suppress(OSError):
        # Fails for a kernel thread and a zombie, which have none.
        if not environment and os.readlink(f"/proc/{pid}/exe"):  # noqa: PTH115
            # The end of the environment in memory (proc_pid_stat(5): env_end), which a program without variables has.
            while _facts_of(pid, "stat").rpartition(b")")[2].split()[48:49] == [b"0"] and time.monotonic() < until_s:
                time.sleep(0.001)
            environment = _facts_of(pid, "environ")
    return environment


def _namespace_of(pid: int | str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115
    return ""


def clean_up(processes: JobProcesses, run_dirs: Iterable[str]) -> None:
    """Kill a job's processes, and remove those of its run directories that exist."""
    sweep(processes)
    for run_dir in run_dirs:
        # Others may write to its parent folder. A link is not followed.
        with suppress(OSError):
            if os.lstat(run_dir).st_uid == os.geteuid():
                rmtree(run_dir, ignore_errors=True)


def sweep(processes: JobProcesses, spare: Collection[int] = (), meanwhile: Callable[[], None] = lambda: None) -> None:
    """SIGKILL all of `processes` but those in `spare`, until none is left.

    Helpers that clean up after other processes (`CLEANERS`) are killed only if they still run CLEANERS_S after the
    others. `meanwhile` is called repeatedly while there is something to wait for.
    """
    start_s = now_s = others_s = time.monotonic()
    while (found := living(processes, spare)) and now_s < start_s + SWEEP_S_MAX:
        cleaners = {pid for pid in found if is_cleaner(pid)}
        if len(cleaners) < len(found):
            others_s = now_s
        for pid in found:
            if pid not in cleaners or now_s >= others_s + CLEANERS_S:
                _kill(pid, processes)
        meanwhile()
        # A killed process leaves /proc a little later; a poll every millisecond is soon enough. One that takes longer
        # needs the CPU, and a poll reads the environment of every process.
        time.sleep(0.001 if now_s < start_s + 0.1 else 0.01)
        now_s = time.monotonic()


def living(processes: JobProcesses, spare: Collection[int] = ()) -> list[int]:
    """The pids of `processes` that are alive (no zombies), without this process and those in `spare`."""
    mine, until_s = {os.getpid(), *spare}, time.monotonic() + _EXEC_S_MAX
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [pid for pid in pids if pid not in mine and processes.has(pid, until_s)]


def is_cleaner(pid: int) -> bool:
    """Whether it is a helper that cleans up after other processes."""
    command = _facts_of(pid, "cmdline")
    return any(name in command for name in CLEANERS)


def _kill(pid: int, processes: JobProcesses) -> None:
    pidfd = -1
    with suppress(OSError, AttributeError):
        pidfd = os.pidfd_open(pid)
    # The pid may have been reused since it was listed. The pidfd refers to one process: check that one.
    if processes.has(pid):
        with suppress(OSError):
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except (OSError, AttributeError) as error:
                # No pidfds: a container's seccomp profile, an old kernel or Python. The check was a moment ago.
                if not isinstance(error, ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    if pidfd >= 0:
        os.close(pidfd)


def boot_id() -> bytes:
    """The host's boot id, which is the same in all its containers until the host reboots."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def remove_abandoned(run_dirs: Iterable[str]) -> None:
    """Remove this user's run directories whose agents are dead, from the folders in which `run_dirs` are."""
    for parent in {os.path.dirname(run_dir) for run_dir in run_dirs}:  # noqa: PTH120
        with suppress(OSError):
            names = [name for name in os.listdir(parent) if RUN_DIR.fullmatch(name)]  # noqa: PTH208
            for name in names:
                _remove_if_abandoned(Path(parent, name))


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError), ExitStack() as opened:
        # The folder stays open: in a shared temporary folder others may rename it, and put another in its place.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.callback(os.close, fd)
        found = os.fstat(fd)
        # Continue only with a folder in which no other user can have put anything.
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return
        claim = os.open(CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        opened.callback(os.close, claim)
        # This fails if the folder's agent lives, or if another guardian removes the folder.
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(claim, 64) == boot_id():
            _empty(Path(f"/proc/self/fd/{fd}"))
            folder.rmdir()


def _empty(folder: Path) -> None:
    """Empty the folder, the claim last: after an interruption the next guardian finds the folder again."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            rmtree(path, ignore_errors=True)
        elif path.name != CLAIM:
            path.unlink()
    (folder / CLAIM).unlink()


def _report_death(notes: Mapping[str, Any]) -> None:
    """Report an agent that did not exit normally. `notes` are its facts: see `GuardianClient.note`."""
    pid, host, generation, count = notes["pid"], notes["host"], notes.get("generation", -1), notes.get("workers", 0)
    when = f"in generation {generation}" if generation >= 0 else "before its workers ran"
    ended = f"; its {count} workers there were ended" if count > 1 else "; its worker there was ended" * count
    text = (
        f"elaunch itself (pid {pid}) died on {host} {when}, by a signal such as kill -9, or a crash of its own{ended}"
    )
    at = time.time()
    line = f"elaunch: {text}"
    if notes["form"] == "json":
        moment = datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
        line = json.dumps({"time": moment, "level": "error", "node": host, "generation": generation, "text": text})
    elif notes["form"] == "timed":
        line = time.strftime("%Y-%m-%d %H:%M:%S ") + line
    with suppress(OSError):
        # A full pipe may have no reader.
        if select.select([], [2], [], _LAST_LINE_S)[1]:
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))
    event = {"generation": generation, "event": "agent_died", "at": at, "monotonic_s": time.monotonic()}
    entry = json.dumps({**event, "host": host, "pid": pid, "workers": count, "reason": text})
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError), os.fdopen(os.open(notes.get("timeline", ""), flags), "r+b") as file:
        # The agent's last line may be cut.
        is_cut = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        file.write(f"{chr(10) if is_cut else ''}{entry}\n".encode())


def main() -> None:
    """Wait for the agent's end, then clean up."""
    # A scheduler signals all of a job's processes. The guardian exits only when its work is done.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    processes, run_dirs = JobProcesses(*json.loads(sys.argv[1])), json.loads(os.environ[RUN_DIRS])
    # In a thread, since removing gigabytes takes seconds, and the agent may die meanwhile.
    # If no thread can start, or the job ends first, the next agent's guardian removes them.
    with suppress(RuntimeError):
        threading.Thread(target=remove_abandoned, args=(run_dirs,), daemon=True).start()
    notes: dict[str, Any] = {}
    rest = b""
    while piece := os.read(0, 4096):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            # A note that did not fit into a full socket was cut. The next one has all facts again.
            with suppress(ValueError):
                notes.update(json.loads(line))
    clean_up(processes, run_dirs)
    if "pid" in notes and not notes.get("is_over"):
        _report_death(notes)


if __name__ == "__main__":
    main()
