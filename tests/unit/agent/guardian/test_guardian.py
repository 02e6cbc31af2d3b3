"""agent.guardian: which processes belong to a job, and the sweep that ends them, with real processes."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elaunch.agent.guardian import cgroup, guardian
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.guardian.guardian import JOB_VARIABLES, VARIABLE, Kin, living, remove_abandoned_cgroups, sweep
from elaunch.agent.linux import is_stopped, thread_call
from tests.harness import DEADLINE_S, RUN_LIMIT_S, wait_for

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


def kin_of(marker: str) -> Kin:
    """The kin of an agent that would run in this process."""
    return Kin.of_this_process(marker, os.environ)


class Spawned:
    """Starts processes with a marker, and ends those that a test leaves."""

    def __init__(self) -> None:
        self.kin = kin_of(secrets.token_hex(8))
        self._processes: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []

    def start(self, source: str, markers: str | None = None, **more: str) -> subprocess.Popen[str]:
        """Start Python code that prints a line when it is ready. `more` are further variables."""
        environ = {**os.environ, **more, VARIABLE: self.kin.marker if markers is None else markers}
        process = subprocess.Popen([sys.executable, "-S", "-c", source], env=environ, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        return process

    def pid(self, source: str, markers: str | None = None, **more: str) -> int:
        """Start such code and read the pid that it prints."""
        process = self.start(source, markers, **more)
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
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until_gone(*pids: int) -> None:
    """Wait until the process is gone. The sweep may end a moment earlier, when the environment is already empty."""
    wait_for(lambda: not any(is_running(pid) for pid in pids), f"the end of {pids}")


READY = f"import os; print(os.getpid(), flush=True); {SLEEP}"


@pytest.mark.parametrize("source", [READY, SETSID, DOUBLE_FORK], ids=["child", "own session", "double fork"])
def test_a_process_of_the_job_is_found_and_ended_wherever_it_stands(spawned: Spawned, source: str) -> None:
    pid = spawned.pid(source)

    wait_for(lambda: living(spawned.kin) == [pid], "it alone, its parents gone")
    ended = sweep(spawned.kin)

    assert ended == 1
    wait_until_gone(pid)


@pytest.mark.parametrize("call", ["os.pidfd_open", "signal.pidfd_send_signal"])
def test_a_python_without_pidfds_ends_a_job_too(spawned: Spawned, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(call)
    mine, stranger = spawned.pid(READY), spawned.pid(READY, "")

    sweep(spawned.kin)

    wait_until_gone(mine)
    assert is_running(stranger)


def test_all_of_a_job_are_ended_at_once(spawned: Spawned) -> None:
    pids = [spawned.pid(source) for source in (READY, SETSID, DOUBLE_FORK, READY)]
    wait_for(lambda: sorted(living(spawned.kin)) == sorted(pids), "them alone, the parents of one gone")

    ended = sweep(spawned.kin)

    assert ended == 4
    wait_until_gone(*pids)
    assert living(spawned.kin) == []


def test_strangers_survive(spawned: Spawned) -> None:
    other_job, no_job = spawned.pid(READY, secrets.token_hex(8)), spawned.pid(READY, "")
    mine = spawned.pid(READY)

    sweep(spawned.kin)

    wait_until_gone(mine)
    assert is_running(other_job)
    assert is_running(no_job)


def test_a_marker_in_another_variable_makes_nobody_a_member(spawned: Spawned) -> None:
    source = "import os, sys, time; os.execve(sys.executable, ['python', '-S', '-c', {!r}], {!r})"
    marker = spawned.kin.marker
    stranger = spawned.pid(source.format(READY, {"NOTE": marker, VARIABLE: "other", "AFTER": marker}))

    assert living(spawned.kin) == []
    assert sweep(spawned.kin) == 0
    assert is_running(stranger)


def test_a_nested_agents_workers_belong_to_the_outer_job_too(spawned: Spawned) -> None:
    inner = secrets.token_hex(8)
    outer_worker, inner_worker = spawned.pid(READY), spawned.pid(READY, f"{spawned.kin.marker},{inner}")

    inner_found, outer_found = living(kin_of(inner)), living(spawned.kin)

    assert inner_found == [inner_worker]
    assert sorted(outer_found) == sorted([outer_worker, inner_worker])


def test_who_is_spared_survives(spawned: Spawned) -> None:
    spared, ended = spawned.pid(READY), spawned.pid(READY)

    count = sweep(spawned.kin, (spared,))

    assert count == 1
    assert is_running(spared)
    wait_until_gone(ended)


def test_zombies_do_not_count(spawned: Spawned) -> None:
    zombie = spawned.start("import os; os._exit(0)")
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)

    found = living(spawned.kin)
    ended = sweep(spawned.kin)

    assert os.path.exists(f"/proc/{zombie.pid}")  # noqa: PTH110
    assert (found, ended) == ([], 0)


def test_the_sweeper_spares_itself(spawned: Spawned) -> None:
    source = (
        "import sys\n"
        "from elaunch.agent.guardian.guardian import Kin, living, sweep\n"
        f"kin = Kin.read({spawned.kin.text()!r})\n"
        "print(living(kin), sweep(kin))\n"
    )
    environ = {**os.environ, VARIABLE: spawned.kin.marker}

    said = subprocess.run(
        [sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True, timeout=RUN_LIMIT_S
    )

    assert said.stdout == "[] 0\n"


def test_a_job_without_processes_is_swept_at_once() -> None:
    kin = kin_of(secrets.token_hex(8))

    assert (living(kin), sweep(kin)) == ([], 0)


def test_who_is_born_after_the_look_is_ended_by_the_next(spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    first, born = spawned.pid(READY), []

    def look(kin: Kin, spare: Collection[int]) -> list[int]:
        found = living(kin, spare)
        if not born:
            born.append(spawned.pid(READY))
        return found

    monkeypatch.setattr(guardian, "living", look)

    ended = sweep(spawned.kin)

    assert ended == 2
    wait_until_gone(first)
    wait_until_gone(born[0])


# Its name, and the fifo that its last writer closes, are those of multiprocessing's helper.
TRACKER = """
# multiprocessing.resource_tracker
import os, time
print(os.getpid(), flush=True)
open(os.environ["FIFO"], "rb").read()
while time.process_time() < float(os.environ["WORKS_S"]):
    pass
open(os.environ["FIFO"] + ".cleaned", "w").close()
"""
WRITER = f"import os; file = open(os.environ['FIFO'], 'wb'); print(os.getpid(), flush=True); {SLEEP}"


def tracked(spawned: Spawned, folder: Path, works_s: float, markers: str | None = None) -> tuple[int, int, Path]:
    """A helper that works for so long once its writer has ended, that writer, and the file that it leaves then."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    tracker = spawned.pid(TRACKER, FIFO=str(fifo), WORKS_S=str(works_s))
    return tracker, spawned.pid(WRITER, markers, FIFO=str(fifo)), fifo.with_name("fifo.cleaned")


def test_a_helper_that_cleans_up_has_the_time_that_a_busy_host_needs(
    spawned: Spawned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "CLEANERS_S", 0.3)
    tracker, writer, cleaned = tracked(spawned, tmp_path, 0.8)

    ended = sweep(spawned.kin)

    assert ended == 1
    wait_until_gone(tracker, writer)
    assert cleaned.exists()


def test_a_helper_that_waits_for_a_stranger_is_ended(spawned: Spawned, tmp_path: Path) -> None:
    tracker, stranger, cleaned = tracked(spawned, tmp_path, 0.5, markers="")

    ended = sweep(spawned.kin)

    assert ended == 1
    wait_until_gone(tracker)
    assert is_running(stranger)
    assert not cleaned.exists()


def test_a_helper_that_never_ends_its_work_is_ended(spawned: Spawned, tmp_path: Path) -> None:
    tracker, writer, cleaned = tracked(spawned, tmp_path, 1e9)

    ended = sweep(spawned.kin)

    assert ended == 2
    wait_until_gone(tracker, writer)
    assert not cleaned.exists()


# --- processes with the marker that belong to somebody else

MARKER = "c0ffee00c0ffee00"
NAMESPACE = "pid:[4026531836]"


@pytest.mark.parametrize("variable", JOB_VARIABLES)
def test_a_process_of_another_job_of_the_scheduler_survives(spawned: Spawned, variable: str) -> None:
    kin = Kin.of_this_process(spawned.kin.marker, {variable: "12"})
    other, same, none = (spawned.pid(READY, **{variable: job}) for job in ("13", "12", ""))

    ended = sweep(kin)

    assert ended == 2
    wait_until_gone(same, none)
    assert is_running(other)


@pytest.mark.parametrize("job", ["1\n2", "a=1\n\nb", "\udcff", "9" * 100_000, '"]', "\x85\r"])
def test_a_job_is_ended_by_its_guardian_whatever_the_schedulers_id_is(spawned: Spawned, job: str) -> None:
    guard = GuardianClient((), {"OAR_JOB_ID": job})
    mine = spawned.pid(READY, markers=guard.marker, OAR_JOB_ID=job)
    other = spawned.pid(READY, markers=guard.marker, OAR_JOB_ID="13")
    os.close(guard._fd)

    assert guard._process.wait(DEADLINE_S) == 0
    wait_until_gone(mine)
    assert is_running(other)


@pytest.mark.parametrize("name", ["a\rb", "a\x85b", "a\u2028b", "a:b", "\udcff"])
def test_a_cgroup_of_any_name_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"3:name=systemd:/{name}\n2:cpu,cpuacct:/\n0::/{name}\n".encode(errors="surrogateescape")
    monkeypatch.setattr(guardian, "_facts_of", lambda pid, name: lines)

    kin = kin_of(MARKER)

    assert kin._cgroups == {"": f"/{name}", "name=systemd": f"/{name}"}
    assert vars(Kin.read(kin.text())) == vars(kin)


def test_a_job_that_was_handed_in_from_outside_of_any_survives(spawned: Spawned) -> None:
    kin = Kin.of_this_process(spawned.kin.marker, {})
    job, mine = spawned.pid(READY, SLURM_JOB_ID="13"), spawned.pid(DOUBLE_FORK)

    sweep(kin)

    wait_until_gone(mine)
    assert is_running(job)


SLURM_STEP = "/system.slice/slurmstepd.scope/job_12/step_0/user/task_0"


@pytest.mark.parametrize("whose", ["living", "dead", "of another user"])
def test_only_an_empty_cgroup_of_a_dead_agent_of_this_user_is_removed(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"elaunch-{secrets.token_hex(8)}"
    code = f"from elaunch.agent.guardian.cgroup import JobCgroup as C; c = C({name!r}); c.make(); c.generation(0)"
    with subprocess.Popen([sys.executable, "-c", f"{code}; print(c.path, flush=True); input()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:  # fmt: skip
        assert agent.stdout
        path = agent.stdout.readline().strip()
        if not path:
            agent.kill()
            pytest.skip("this user may make no cgroup (v2)")
        if whose != "living":
            agent.kill()
            agent.wait(DEADLINE_S)
        if whose == "of another user":
            monkeypatch.setattr(os, "geteuid", lambda: 12345)

        remove_abandoned_cgroups(f"{path}/../elaunch-{secrets.token_hex(8)}")

        assert Path(path, "generation_0").exists() == (whose != "dead")
        agent.kill()
    monkeypatch.undo()
    remove_abandoned_cgroups(path)
    assert not Path(path).exists()


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
        kin = Kin(MARKER, jobs, {name: own} if own else {}, NAMESPACE)

        assert kin.is_elsewhere(jobs, {name: cgroup} if cgroup else {}, NAMESPACE) is is_elsewhere


@pytest.mark.parametrize(
    ("cgroup", "is_elsewhere"), [("/", False), (f"/elaunch-{MARKER}/generation_0", False), ("/docker/12ab", True)]
)
def test_of_another_pid_namespace_a_container_is_elsewhere_and_a_workers_own_is_not(
    cgroup: str, is_elsewhere: bool
) -> None:
    kin = Kin(MARKER, {}, {"": "/"}, NAMESPACE)

    assert kin.is_elsewhere({}, {"": cgroup}, "pid:[4026532000]") is is_elsewhere
    assert not kin.is_elsewhere({}, {"": cgroup}, NAMESPACE)


def test_the_guardian_knows_what_its_agent_knows() -> None:
    cgroups = {"": "/a b/c=d", "name=systemd": "/user.slice"}
    for kin in (Kin(MARKER, {"PBS_JOBID": "1=2.x"}, cgroups, NAMESPACE), Kin(MARKER, {}, {}, "")):
        read = Kin.read(kin.text())

        assert vars(read) == vars(kin)


# As a worker of a DataLoader: a socket in the folder of multiprocessing.
WITH_FOLDER = f"""
import os, socket, sys
from multiprocessing import util
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{{util.get_temp_dir()}}/listener-{{os.getpid()}}")
listener.listen()
print(os.getpid(), flush=True)
{SLEEP}
"""


def folders(tmp: Path) -> list[Path]:
    return list(tmp.glob("pymp-*"))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_end_of_a_job_removes_no_folder_of_another_user(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    os.chown(other, 65534, 65534)

    guardian.clean_up(Kin(secrets.token_hex(8), {}, {}, ""), "", [str(own), str(other), str(tmp_path / "none")])

    assert (own.exists(), other.exists()) == (False, True)


def test_a_lock_that_somebody_holds_on_a_new_cgroup_does_not_hold_the_start(tmp_path: Path) -> None:
    theirs = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(theirs, fcntl.LOCK_EX)
    found: list[bool] = []

    ours = threading.Thread(target=lambda: found.append(cgroup._is_locked(tmp_path)), daemon=True)
    ours.start()
    ours.join(DEADLINE_S)
    os.close(theirs)

    assert found == [True]


def test_the_temporary_folder_of_a_killed_data_loader_is_removed(spawned: Spawned, short_folder: Path) -> None:
    pid = spawned.pid(WITH_FOLDER, TMPDIR=str(short_folder))
    assert len(folders(short_folder)) == 1

    sweep(spawned.kin)

    wait_until_gone(pid)
    assert folders(short_folder) == []


def test_a_folder_in_which_a_stranger_has_a_socket_too_stays(spawned: Spawned, short_folder: Path) -> None:
    spawned.pid(WITH_FOLDER, TMPDIR=str(short_folder))
    (folder,) = folders(short_folder)
    spawned.pid(WITH_FOLDER, "", TMPDIR=str(short_folder))

    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(str(folder / "mine"))
        sweep(spawned.kin)

    assert len(folders(short_folder)) == 2
    assert (folder / "mine").exists()


def test_a_link_to_another_folder_is_not_followed(spawned: Spawned, short_folder: Path) -> None:
    spawned.pid(WITH_FOLDER, TMPDIR=str(short_folder))
    (folder,) = folders(short_folder)
    kept = folder.rename(short_folder / "kept")
    folder.symlink_to(kept)

    sweep(spawned.kin)

    assert list(kept.iterdir())


def test_the_folder_of_a_loader_that_ends_with_its_signalled_worker_is_removed(
    spawned: Spawned, short_folder: Path
) -> None:
    client = GuardianClient((), {})
    pid = spawned.pid(WITH_FOLDER, client.marker, TMPDIR=str(short_folder))

    client.note_folders(())
    # As Python does with a DataLoader's processes at the end of their parent.
    os.kill(pid, signal.SIGTERM)
    wait_until_gone(pid)
    assert len(folders(short_folder)) == 1
    client.end_generation(0, (), lambda: None)

    client.finish()
    assert folders(short_folder) == []


def test_the_guardian_imports_when_it_is_woken_and_waits_for_the_agents_end_then() -> None:
    """It waits for the word in `poll`, and in `read` for the agent's end. Without the word it would wait a minute."""
    guard = GuardianClient((), {})
    pid = guard.pid
    try:
        wait_for(lambda: thread_call(pid, pid)[0] == "poll", "the guardian to wait for its agent's word")
        before = Path(f"/proc/{pid}/statm").read_text().split()[1]
        woken_s = time.monotonic()
        guard.note(generation=0, workers=1)
        wait_for(lambda: thread_call(pid, pid)[0] == "read", "the guardian to wait for its agent's end")
        after = Path(f"/proc/{pid}/statm").read_text().split()[1]

        assert time.monotonic() - woken_s < 50
        assert int(before) < int(after)
    finally:
        guard.finish()


def test_the_guardian_that_was_not_woken_cleans_up_all_the_same(spawned: Spawned) -> None:
    guard = GuardianClient((), {})
    mine = spawned.pid(READY, markers=guard.marker)

    guard.finish()

    wait_until_gone(mine)


def test_a_note_that_was_cut_keeps_the_guardian_from_nothing(spawned: Spawned) -> None:
    guard = GuardianClient((), {})
    mine = spawned.pid(READY, markers=guard.marker)
    os.kill(guard.pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(guard.pid), "the guardian's stop")
    # More than the pipe holds, of which the kernel takes a part. It takes a part of the next, too, after a read.
    for _ in range(10):
        guard.note(timeline="x" * 20_000)

    os.kill(guard.pid, signal.SIGCONT)
    wait_for(lambda: thread_call(guard.pid, guard.pid)[0] == "poll", "the guardian to read all")
    guard.note(generation=0, workers=1)
    guard.finish()

    assert guard._process.returncode == 0
    wait_until_gone(mine)


def test_where_a_guardian_cannot_be_replaced_the_agent_cleans_up_itself(spawned: Spawned) -> None:
    guard = GuardianClient((), {})
    mine = spawned.pid(READY, markers=guard.marker)
    os.kill(guard.pid, signal.SIGKILL)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            guard.restart()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    guard.finish()

    wait_until_gone(mine)
