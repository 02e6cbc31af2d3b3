"""agent.guardian: which processes belong to a job, and the sweep that ends them, with real processes."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elaunch.agent.guardian import guardian
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.guardian.guardian import JOB_VARIABLES, VARIABLE, JobProcesses, living, sweep
from elaunch.agent.linux import state
from tests.harness import DEADLINE_S, wait_for

SLEEP = "import time; time.sleep(600)"
SETSID = f"import os; os.setsid(); print(os.getpid(), flush=True); {SLEEP}"
# The parent and its child end at once, and the grandchild becomes an orphan.
DOUBLE_FORK = f"""
import os
if os.fork():
    os.wait()
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
{SLEEP}
"""


def processes_of(marker: str) -> JobProcesses:
    """The processes of an agent that would run in this process."""
    return JobProcesses.of_this_process(marker, os.environ)


class Spawned:
    """Starts processes with a marker, and ends those that a test leaves."""

    def __init__(self) -> None:
        self.processes = processes_of(secrets.token_hex(8))
        self._processes: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []

    def pid(self, source: str, markers: str | None = None, **more: str) -> int:
        """Start Python code that prints its pid when it is ready. `more` are further variables."""
        environ = {**os.environ, **more, VARIABLE: self.processes.marker if markers is None else markers}
        process = subprocess.Popen([sys.executable, "-S", "-c", source], env=environ, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout
        pid = int(process.stdout.readline())
        self._pids.append(pid)
        return pid

    def close(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def spawned() -> Iterator[Spawned]:
    spawned = Spawned()
    yield spawned
    spawned.close()


def is_running(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def wait_until_gone(*pids: int) -> None:
    """Wait until the process is gone. The sweep may end a moment earlier, when the environment is already empty."""
    wait_for(lambda: not any(is_running(pid) for pid in pids), f"the end of {pids}")


READY = f"import os; print(os.getpid(), flush=True); {SLEEP}"


@pytest.mark.parametrize("source", [READY, SETSID, DOUBLE_FORK], ids=["child", "own session", "double fork"])
def test_a_process_of_the_job_is_found_and_ended_wherever_it_stands(spawned: Spawned, source: str) -> None:
    pid = spawned.pid(source)

    wait_for(lambda: living(spawned.processes) == [pid], "it alone, its parents gone")
    sweep(spawned.processes)

    wait_until_gone(pid)


def test_processes_without_the_marker_survive(spawned: Spawned) -> None:
    other_job, no_job = spawned.pid(READY, secrets.token_hex(8)), spawned.pid(READY, "")
    mine, spared = spawned.pid(READY), spawned.pid(READY)

    sweep(spawned.processes, (spared,))

    wait_until_gone(mine)
    assert is_running(spared)
    assert is_running(other_job)
    assert is_running(no_job)


def test_a_marker_in_another_variable_makes_no_process_a_member(spawned: Spawned) -> None:
    source = "import os, sys, time; os.execve(sys.executable, ['python', '-S', '-c', {!r}], {!r})"
    marker = spawned.processes.marker
    stranger = spawned.pid(source.format(READY, {"NOTE": marker, VARIABLE: "other", "AFTER": marker}))

    assert living(spawned.processes) == []
    sweep(spawned.processes)
    assert is_running(stranger)


def test_a_nested_agents_workers_belong_to_the_outer_job_too(spawned: Spawned) -> None:
    inner = secrets.token_hex(8)
    outer_worker, inner_worker = spawned.pid(READY), spawned.pid(READY, f"{spawned.processes.marker},{inner}")

    inner_found, outer_found = living(processes_of(inner)), living(spawned.processes)

    assert inner_found == [inner_worker]
    assert sorted(outer_found) == sorted([outer_worker, inner_worker])


def test_a_process_in_the_middle_of_an_exec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = secrets.token_hex(16)
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for _ in range(50):
            with subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: marker}) as started:
                # The others would take longer than the exec.
                monkeypatch.setattr(os, "listdir", lambda _, pid=started.pid: [str(pid)])
                found = living(processes_of(marker))
                started.kill()
                assert found == [started.pid]
    finally:
        for process in busy:
            process.kill()
            process.wait(DEADLINE_S)


def test_a_process_forked_after_the_listing_is_ended_by_the_next(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, born = spawned.pid(READY), []

    def listing(processes: JobProcesses, spare: Collection[int]) -> list[int]:
        found = living(processes, spare)
        if not born:
            born.append(spawned.pid(READY))
        return found

    monkeypatch.setattr(guardian, "living", listing)

    sweep(spawned.processes)

    wait_until_gone(first)
    wait_until_gone(born[0])


# Its name, and the fifo that its last writer closes, are those of multiprocessing's helper.
TRACKER = """
# multiprocessing.resource_tracker
import os, time
print(os.getpid(), flush=True)
open(os.environ["FIFO"], "rb").read()
time.sleep(float(os.environ["WORKS_S"]))
open(os.environ["FIFO"] + ".cleaned", "w").close()
"""
WRITER = f"import os; file = open(os.environ['FIFO'], 'wb'); print(os.getpid(), flush=True); {SLEEP}"


@pytest.mark.parametrize("works_s", [0.5, 600.0])
def test_a_helper_that_cleans_up_has_a_little_time_once_its_job_is_gone(
    spawned: Spawned, tmp_path: Path, works_s: float
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    tracker = spawned.pid(TRACKER, FIFO=str(fifo), WORKS_S=str(works_s))
    writer = spawned.pid(WRITER, FIFO=str(fifo))

    sweep(spawned.processes)

    is_quick = works_s < guardian.CLEANERS_S
    wait_until_gone(tracker, writer)
    assert fifo.with_name("fifo.cleaned").exists() == is_quick


MARKER = "c0ffee00c0ffee00"
NAMESPACE = "pid:[4026531836]"


@pytest.mark.parametrize("variable", JOB_VARIABLES)
def test_a_process_of_another_job_of_the_scheduler_survives(spawned: Spawned, variable: str) -> None:
    processes = JobProcesses.of_this_process(spawned.processes.marker, {variable: "12"})
    other, same, none = (spawned.pid(READY, **{variable: job}) for job in ("13", "12", ""))

    sweep(processes)

    wait_until_gone(same, none)
    assert is_running(other)


@pytest.mark.parametrize("job", ["1\n2", "a=1\n\nb", "\udcff", "9" * 100_000, '"]', "\x85\r"])
def test_a_job_is_ended_by_its_guardian_whatever_the_schedulers_id_is(spawned: Spawned, job: str) -> None:
    guard = GuardianClient((), {"OAR_JOB_ID": job})
    mine = spawned.pid(READY, markers=guard.marker, OAR_JOB_ID=job)
    other = spawned.pid(READY, markers=guard.marker, OAR_JOB_ID="13")
    guard._socket.close()

    assert guard._process.wait(DEADLINE_S) == 0
    wait_until_gone(mine)
    assert is_running(other)


SLURM_STEP = "/system.slice/slurmstepd.scope/job_12/step_0/user/task_0"


@pytest.mark.parametrize(
    ("own", "cgroup", "jobs", "is_elsewhere"),
    [
        ("/user.slice/session-3.scope", "/user.slice/session-3.scope", {}, False),
        ("/user.slice/session-3.scope", "/user.slice/session-3.scope/below", {}, False),
        ("/user.slice/session-3.scope", "/user.slice/session-3.scope-2", {}, True),
        ("/user.slice/session-3.scope", "/user.slice/run-u7.scope", {}, True),
        ("/user.slice/session-3.scope", "/system.slice/atd.service", {}, True),
        ("/user.slice/session-3.scope", "/", {}, True),
        # A fact that cannot be read does not count.
        ("/user.slice/session-3.scope", "", {}, False),
        ("", "/system.slice/atd.service", {}, False),
        # Another step of the same job, of Slurm and of PBS; another job; a session that happens to have its number.
        (SLURM_STEP, "/system.slice/slurmstepd.scope/job_12/step_1/user/task_3", {"SLURM_JOB_ID": "12"}, False),
        (SLURM_STEP, "/system.slice/slurmstepd.scope/job_12/step_1/user/task_3", {}, True),
        (SLURM_STEP, "/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", {"SLURM_JOB_ID": "12"}, True),
        ("/pbs/jobid/12.head/a", "/pbs/jobid/12.head/b", {"PBS_JOBID": "12.head"}, False),
        ("/user-12.slice/session-1.scope", "/user-12.slice/run-u1.scope", {"SLURM_JOB_ID": "12"}, True),
        # The root holds all of a host, but not what lies outside of a container's view.
        ("/", "/system.slice/atd.service", {}, False),
        ("/", "/../other", {}, True),
    ],
)
def test_a_cgroup_that_is_not_of_the_agents_job_is_elsewhere(
    own: str, cgroup: str, jobs: dict[str, str], is_elsewhere: bool
) -> None:
    for name in ("", "name=systemd"):
        processes = JobProcesses(MARKER, jobs, {name: own} if own else {}, NAMESPACE)

        assert processes.is_elsewhere(jobs, {name: cgroup} if cgroup else {}, NAMESPACE) is is_elsewhere


@pytest.mark.parametrize(("cgroup", "is_elsewhere"), [("/", False), ("/docker/12ab", True)])
def test_of_another_pid_namespace_a_container_is_elsewhere_and_a_workers_own_is_not(
    cgroup: str, is_elsewhere: bool
) -> None:
    processes = JobProcesses(MARKER, {}, {"": "/"}, NAMESPACE)

    assert processes.is_elsewhere({}, {"": cgroup}, "pid:[4026532000]") is is_elsewhere
    assert not processes.is_elsewhere({}, {"": cgroup}, NAMESPACE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_end_of_a_job_removes_no_folder_of_another_user(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    os.chown(other, 65534, 65534)

    guardian.clean_up(JobProcesses(secrets.token_hex(8), {}, {}, ""), [str(own), str(other), str(tmp_path / "none")])

    assert (own.exists(), other.exists()) == (False, True)


def test_where_a_guardian_cannot_be_replaced_the_agent_cleans_up_itself(spawned: Spawned) -> None:
    guard = GuardianClient((), {})
    mine = spawned.pid(READY, markers=guard.marker)
    guard._process.kill()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            guard.restart()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    guard.finish()

    wait_until_gone(mine)
