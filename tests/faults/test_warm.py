"""What can happen to a fork server that stays, to its socket and to the jobs that start from it."""

from __future__ import annotations

import errno
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import is_alive, library
from tests.harness import COMMAND, DEADLINE_S, RUN_LIMIT_S, Job, environment, script, wait_for
from tests.standin import with_dynamo
from tests.warm import command, leave_one, own_place, run, states, stayed

WARM = ("--preload-only", "json,heavy", "--warm")
# A job of one worker that says who forked its fork server, and what it finds.
TELL = """
import heavy, os
server = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
first = dict(entry.split("=", 1) for entry in open("/proc/self/environ").read().split("\\0") if entry)
print("told", heavy.WORD, server, os.environ.get("MINE"), "ELAUNCH_MARKER" in first, first.get("MINE"))
"""
WAIT = "import heavy, os, signal\nprint('worker pid', os.getpid(), flush=True)\nsignal.pause()"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
OTHER = 4711


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where fork servers stay; a package that they import is installed beside."""
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "heavy.py").write_text("import os\nWORD = 'one'\nos.environ.get('HEAVY')\n")
    with own_place(tmp_path / "run") as where, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.fspath(packages))
        patched.setenv("OMP_NUM_THREADS", "1")
        patched.setenv("PET_WARM", "")
        script(tmp_path, TELL)
        yield where


def told(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """What the worker said after `told`."""
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()[1:]


def cold(ended: subprocess.CompletedProcess[str]) -> str:
    """Why the job started cold."""
    found = re.search(r"cold start: (.*)", ended.stderr)
    assert found, ended.stderr
    return found[1]


def options() -> dict[str, str]:
    """The environment by which tests give the threads and get all lines; `environment` drops that of the tests."""
    return {"OMP_NUM_THREADS": "1", "PET_VERBOSE": "1"}


def again(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run(folder, *WARM, *(words or ("train.py",)), env={**options(), **env})


def are_gone(*pids: int) -> bool:
    return not any(is_alive(pid) for pid in pids)


def takes_no_connection(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        return connection.connect_ex(os.fspath(path)) == errno.EAGAIN


def first(folder: Path) -> int:
    """The pid of the fork server that a first job has left."""
    pid: int = leave_one(folder, *WARM, env=options())["pid"]
    return pid


def test_the_next_job_starts_from_it_with_an_environment_of_its_own(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)

    ended = again(tmp_path, MINE="yes")

    assert told(ended) == ["one", str(pid), "yes", "True", "yes"]
    assert "warm start: from the fork server that stayed since" in ended.stderr
    assert "stays" not in ended.stderr
    assert place.stat().st_mode & 0o777 == 0o700


def test_what_nobody_has_read_of_the_first_jobs_environment_does_not_stay(tmp_path: Path, place: Path) -> None:
    secret = {**options(), "AWS_SECRET_ACCESS_KEY": "s3cret", "ELAUNCH_TOKEN": "t0ken", "HEAVY": "read"}
    pid = leave_one(tmp_path, *WARM, env=secret)["pid"]
    script(tmp_path, "import os, posix\nprint(open('/proc/self/environ').read(), os.environ, posix.environ)", "show.py")

    kept = Path(f"/proc/{pid}/environ").read_text()
    ended = again(tmp_path, "show.py", HEAVY="read")

    assert "s3cret" not in kept
    assert "t0ken" not in kept
    assert "HEAVY=read" in kept
    assert "warm start:" in ended.stderr, ended.stderr
    assert "s3cret" not in ended.stdout


@pytest.mark.parametrize("text", ["import torch", "import torch\nand a mistake"])
def test_one_of_a_program_that_does_not_use_all_of_the_default_serves_one_that_does(
    tmp_path: Path, place: Path, text: str
) -> None:
    with_dynamo(tmp_path / "lib" / "site-packages")
    script(tmp_path, text)
    script(tmp_path, "import torch._dynamo, os\nprint('told', torch._dynamo.BY != os.getpid())", "optimizes.py")
    ended = run(tmp_path, "--warm", "train.py", env=options())
    assert "a fork server stays" in ended.stderr, ended.stderr
    stayed()

    small, large = (run(tmp_path, "--warm", name, env=options()) for name in ("train.py", "optimizes.py"))

    for job in (small, large):
        assert "warm start: from the fork server that stayed since" in job.stderr
    assert told(large) == ["True"]


@pytest.mark.slow
def test_two_jobs_at_once_start_from_the_same_one(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda _: again(tmp_path), range(2)))

    assert [told(ended)[1] for ended in ends] == [str(pid)] * 2


@pytest.mark.slow
def test_a_job_that_began_before_there_was_one_leaves_it_alone_when_it_ends(tmp_path: Path, place: Path) -> None:
    script(tmp_path, WAIT, "wait.py")
    with Job(tmp_path, *WARM, "wait.py", env=options()) as job:
        job.wait_for_output(r"worker pid \d+\n")
        pid = first(tmp_path)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output

    assert stayed()["pid"] == pid


@pytest.mark.slow
def test_a_job_outlives_the_kill_of_the_one_that_it_started_from_and_the_next_is_cold(
    tmp_path: Path, place: Path
) -> None:
    pid = first(tmp_path)
    script(tmp_path, WAIT, "wait.py")
    with Job(tmp_path, *WARM, "wait.py", env=options()) as job:
        job.wait_for_output(r"worker pid \d+\n")
        os.kill(pid, signal.SIGKILL)
        os.kill(job.pids("worker")[0], signal.SIGKILL)
        # The restart is a fork of the job's own fork server.
        job.wait_for_output(r"(?s)(worker pid \d+\n.*){2}")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output

    ended = again(tmp_path)

    assert "was killed" in cold(ended)
    assert told(ended)[0] == "one"
    assert "a fork server stays" in ended.stderr
    assert stayed()["pid"] != pid


@pytest.mark.slow
def test_the_loss_of_the_jobs_own_fork_server_is_a_failure_like_any_other(tmp_path: Path, place: Path) -> None:
    first(tmp_path)
    script(tmp_path, WAIT, "wait.py")
    with Job(tmp_path, *WARM, "wait.py", env=options()) as job:
        job.wait_for_output(r"worker pid \d+\n")
        os.kill(psutil.Process(job.pids("worker")[0]).ppid(), signal.SIGKILL)
        job.wait_for_output(r"(?s)(worker pid \d+\n.*){2}")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output

    assert "the fork server was killed by SIGKILL" in job.output


@pytest.mark.slow
def test_ctrl_c_and_the_kill_of_the_agent_end_the_job_and_not_the_server(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    script(tmp_path, WAIT, "wait.py")
    for signum, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with Job(tmp_path, *WARM, "wait.py", env=options()) as job:
            job.wait_for_output(r"worker pid \d+\n")
            (worker,) = job.pids("worker")
            server = psutil.Process(worker).parent()
            assert server
            assert server.parent() == psutil.Process(pid)
            job.signal(signum)
            assert job.wait() == code, job.output
            wait_for(partial(are_gone, worker, server.pid), "the job's processes are gone")

    assert told(again(tmp_path))[1] == str(pid)


def test_a_changed_file_of_a_package_makes_the_next_start_cold_and_the_one_after_it_warm(
    tmp_path: Path, place: Path
) -> None:
    pid = first(tmp_path)
    file = tmp_path / "lib" / "site-packages" / "heavy.py"
    file.write_text("WORD = 'two'\n")

    changed = again(tmp_path)
    following = stayed()["pid"]
    after = again(tmp_path)

    assert cold(changed) == f"{file} has changed"
    assert told(changed)[0] == "two"
    assert following != pid
    assert told(after)[:2] == ["two", str(following)]


def test_a_file_that_a_module_has_read_makes_the_next_start_cold_when_it_changes(tmp_path: Path, place: Path) -> None:
    packages = tmp_path / "lib" / "site-packages"
    (packages / "word.txt").write_text("one")
    (packages / "heavy.py").write_text(
        "import os\nWORD = open(os.path.join(os.path.dirname(__file__), 'word.txt')).read()\n"
        "try: open('settings.txt')\nexcept OSError: pass\n"
    )
    pid = first(tmp_path)
    same = again(tmp_path)
    (tmp_path / "settings.txt").write_text("mine")
    mine = cold(again(tmp_path))
    (tmp_path / "settings.txt").unlink()
    kept = told(again(tmp_path))
    (packages / "word.txt").write_text("two")

    changed = again(tmp_path)

    assert told(same)[:2] == kept[:2] == ["one", str(pid)]
    assert mine == "a module reads settings.txt in the current folder while it is imported"
    assert cold(changed) == f"{packages / 'word.txt'} has changed"
    assert told(changed)[0] == "two"


@pytest.mark.slow
def test_another_number_of_threads_makes_it_cold(tmp_path: Path, place: Path) -> None:
    first(tmp_path)

    ended = again(tmp_path, OMP_NUM_THREADS="2")

    assert cold(ended) == "OMP_NUM_THREADS has another value, which is read when a program starts"
    assert "a fork server stays" in ended.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is one thread for any number of workers")
def test_another_number_of_workers_makes_it_cold_and_is_named_as_the_reason(tmp_path: Path, place: Path) -> None:
    nothing = script(tmp_path, "", "nothing.py")
    leave_one(tmp_path, *WARM)

    more = run(tmp_path, *WARM, "--nproc-per-node", "2", os.fspath(nothing))

    assert cold(more).startswith("2 workers here, and 1 worker before: each has another share of the cores (OMP")
    assert "OMP_NUM_THREADS in the shell" in cold(more)


@pytest.mark.slow
def test_another_limit_makes_it_cold(tmp_path: Path, place: Path) -> None:
    first(tmp_path)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = 4096
    lower = partial(resource.setrlimit, resource.RLIMIT_CORE, (soft, hard))
    with Job(tmp_path, *WARM, "train.py", env=options(), preexec_fn=lower) as job:
        assert job.wait() == 0, job.output

    assert f"cold start: the limit RLIMIT_CORE is {soft} of" in job.output


def test_a_file_beside_the_program_with_the_name_of_a_module_makes_only_that_program_cold(
    tmp_path: Path, place: Path
) -> None:
    pid = first(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    script(other, "WORD = 'mine'", "heavy.py")
    script(other, TELL)

    ended = again(other)

    assert cold(ended) == f"{other / 'heavy.py'} has the name of a module that is loaded"
    assert told(ended)[0] == "mine"
    assert told(again(tmp_path))[1] == str(pid)


def test_one_that_is_stopped_makes_it_cold_and_can_be_ended(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    os.kill(pid, signal.SIGSTOP)

    why = cold(again(tmp_path))
    ended = command("--stop")

    assert why == f"the warm fork server (pid {pid}) is stopped; kill -CONT {pid}, or elaunch warm --stop"
    assert ended.returncode == 0, ended.stderr
    assert not is_alive(pid)
    assert list(place.glob("[0-9a-f]*")) == []


@pytest.mark.slow
def test_one_that_is_stopped_for_long_takes_no_connection_and_makes_no_start_wait(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    (path,) = place.glob("[0-9a-f]*")
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: takes_no_connection(path), "its queue is full", every_s=0)

    shown = command("--status")
    ended = again(tmp_path)

    why = f"the warm fork server (pid {pid}) does not answer, and too many starts wait for it"
    assert shown.stdout == f"{path}: {why}; elaunch warm --stop ends it\n"
    assert cold(ended) == f"{why}; elaunch warm --stop ends it"
    assert told(ended)[0] == "one"
    # Another one has taken its place.
    assert not is_alive(pid)
    assert stayed()["pid"] != pid


def test_who_waits_for_one_that_still_imports_is_told_so_and_starts_from_it(tmp_path: Path, place: Path) -> None:
    heavy = tmp_path / "lib" / "site-packages" / "heavy.py"
    waits = "while 'warm' in open('/proc/self/comm').read() and not os.path.exists(GO):\n    time.sleep(0.01)\n"
    heavy.write_text(f"import os, time\nWORD, GO = 'late', {os.fspath(tmp_path / 'go')!r}\n{waits}")
    left = again(tmp_path)

    with Job(tmp_path, *WARM, "train.py", env=options()) as job:
        job.wait_for_output("still imports; this start waits for it")
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.output

    assert "still imports" not in left.stderr
    assert "warm start: from the fork server" in job.stderr
    assert "told late" in job.stdout


@pytest.mark.slow
def test_many_that_ask_at_once_are_all_answered(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    (path,) = place.glob("[0-9a-f]*")
    with ExitStack() as stack:
        asking = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(40)]
        for each in asking:
            each.connect(os.fspath(path))
            assert b"ready" in each.recv(1000)
        for each in asking:
            each.sendall(b'{"op": "state"}')

        assert all(f'"pid": {pid}' in each.recv(10_000).decode() for each in asking)


@pytest.mark.slow
def test_it_ends_when_no_job_has_used_it_for_its_time(tmp_path: Path, place: Path) -> None:
    ended = run(tmp_path, *WARM[:-1], "train.py", env={**options(), "ELAUNCH_WARM": "0.02"})

    assert "a fork server stays for 0.02 min" in ended.stderr

    wait_for(lambda: states() == [], "it has ended", every_s=0.2)

    assert list(place.glob("[0-9a-f]*")) == []


def test_status_says_what_is_there_and_stop_ends_it(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)

    alone, shown, ended, after = command(), command("--status"), command("--stop"), command("--status")

    assert alone.stdout.splitlines()[1:] == shown.stdout.splitlines()[1:]
    assert (alone.returncode, alone.stdout[:20]) == (0, shown.stdout[:20])
    assert re.match(
        rf"pid {pid}, since 20\d\d-.*, 1[45]\.\d min left, \d+ MB of memory\n  imported: heavy\n", shown.stdout
    )
    assert f"for scripts with {sys.executable}\n  socket: {place}" in shown.stdout
    assert ended.stdout == f"ended: the fork server with pid {pid}\n"
    assert "no fork server stays" in after.stdout


def test_one_that_was_killed_is_no_trouble_and_its_socket_is_removed(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "it is gone")

    shown, ended = command("--status"), command("--stop")

    assert shown.returncode == ended.returncode == 0
    assert shown.stdout.endswith(" was killed; elaunch --warm script.py leaves another one\n")
    assert ended.stdout.startswith("no fork server stays")
    assert not list(place.glob("[0-9a-f]*"))


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, place: Path) -> None:
    first(tmp_path)
    place.chmod(0o755)

    ended = again(tmp_path)
    shown = command("--status")
    place.chmod(0o700)

    assert cold(ended) == f"others may enter {place} (mode 755); remove it, or chmod 700 {place}"
    assert "stays" not in ended.stderr
    assert shown.returncode == 3
    assert "others may enter" in shown.stderr


@pytest.mark.slow
@needs_root
def test_a_folder_or_a_socket_of_another_user_is_refused(tmp_path: Path, place: Path) -> None:
    first(tmp_path)
    (path,) = place.glob("[0-9a-f]*")
    command("--stop")
    place.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        os.seteuid(OTHER)
        listener.listen()
        os.seteuid(0)
        of_socket = cold(again(tmp_path))
    path.unlink()
    os.chown(place, OTHER, -1)

    of_folder = cold(again(tmp_path))

    assert of_socket == f"{path} is a socket of the user with id {OTHER}; remove it"
    assert of_folder.startswith(f"{place} belongs to the user with id {OTHER}; ")
    os.chown(place, 0, -1)


@pytest.mark.slow
@needs_root
def test_another_user_who_reaches_the_socket_is_refused(tmp_path: Path, place: Path) -> None:
    first(tmp_path)
    (path,) = place.glob("[0-9a-f]*")
    ask = (
        f"import os, socket; os.chdir({os.fspath(place)!r}); os.setuid({OTHER}); s = socket.socket(1, 5);"
        f" s.connect({path.name!r}); print(s.recv(1000))"
    )
    path.chmod(0o666)
    place.chmod(0o711)

    said = subprocess.run(
        [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_LIMIT_S
    ).stdout
    place.chmod(0o700)

    assert f"it is not for the user with id {OTHER}" in said


@pytest.mark.slow
@needs_root
def test_a_container_that_shares_the_folder_has_its_own_and_leaves_the_others_alone(
    tmp_path: Path, place: Path
) -> None:
    pid = first(tmp_path)
    (path,) = place.glob("[0-9a-f]*")
    words = shlex.join([*COMMAND, *WARM, "train.py"])
    stop = shlex.join([*COMMAND, "warm", "--stop"])

    said = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", f"{words} && {words}; {stop}; true"],
        cwd=tmp_path,
        env=environment(options()),
        capture_output=True,
        text=True,
        check=True,
        timeout=RUN_LIMIT_S,
    )

    assert said.stdout.count("told one") == 2
    assert "warm start:" in said.stderr
    assert (
        f"{path} is a socket of another container, which shares this folder; end its fork server there" in said.stderr
    )
    assert told(again(tmp_path))[1] == str(pid)
    assert list(place.glob("[0-9a-f]*")) == [path]


@pytest.mark.slow
@needs_root
def test_on_a_full_disk_the_job_runs_and_says_where(tmp_path: Path, place: Path) -> None:
    small = tmp_path / "s"
    small.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nr_inodes=2,mode=700", "small", small], check=True, timeout=RUN_LIMIT_S
    )
    try:
        ended = again(tmp_path, XDG_RUNTIME_DIR=os.fspath(small))
    finally:
        subprocess.run(["umount", small], check=True, timeout=RUN_LIMIT_S)

    assert told(ended)[0] == "one"
    assert f"no fork server stays: {small}/elaunch_warm/lock: No space left on device" in ended.stderr


def test_without_a_place_for_the_socket_the_job_runs_and_says_so(tmp_path: Path, place: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()

    shut = tmp_path / "shut"
    shut.mkdir(mode=0o500)
    # Root may write anywhere, but not there.
    shut = Path("/proc") if os.geteuid() == 0 else shut

    nowhere = again(tmp_path, XDG_RUNTIME_DIR=os.fspath(shut))
    too_long = again(tmp_path, XDG_RUNTIME_DIR=os.fspath(long))

    assert re.search(rf"no fork server stays: {shut}/elaunch_warm cannot be made \(.*\)", nowhere.stderr)
    assert "is too long for a socket" in too_long.stderr
    assert told(nowhere)[0] == told(too_long)[0] == "one"


@pytest.mark.slow
def test_a_socket_without_a_server_is_taken_over(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "it is gone")

    ended = again(tmp_path)

    assert re.fullmatch(rf"the warm fork server of {place}/[0-9a-f]+ was killed", cold(ended))
    assert stayed()["pid"] != pid
    assert len(list(place.glob("[0-9a-f]*"))) == 1


def test_one_that_finds_out_that_it_cannot_stay_tells_the_next_job_why(tmp_path: Path, place: Path) -> None:
    file = tmp_path / "lib" / "site-packages" / "heavy.py"
    # It is written while it is imported.
    file.write_text("WORD = 'one'\nimport os\nos.utime(__file__)\n")
    assert "a fork server stays" in again(tmp_path).stderr
    wait_for(lambda: list(place.glob("*.why")), "it has given up")

    shown = command("--status").stdout
    why = cold(again(tmp_path))
    wait_for(lambda: list(place.glob("*.why")), "the next one has given up too")
    ended = command("--stop")

    assert why == f"the last fork server could not stay: {file} was written while it was imported"
    assert shown == f"{why}; elaunch --warm script.py leaves another one\n"
    assert ended.returncode == 0
    assert [each.name for each in place.iterdir()] == ["lock"]


@pytest.mark.slow
def test_the_packages_of_a_program_are_warm_for_every_program(tmp_path: Path, place: Path) -> None:
    library(tmp_path, "hydra", "import os\nBY = os.getpid()\n")
    with_dynamo(tmp_path / "lib")
    env = {"PYTHONPATH": os.fspath(tmp_path / "lib"), **options()}
    program, other = tmp_path / "program", tmp_path / "other"
    for folder, text in ((program, "import hydra, torch"), (other, "import os, hydra, torch\nprint('by', hydra.BY)")):
        folder.mkdir()
        script(folder, text)
    first = run(program, "--warm", "train.py", env=env)
    assert "a fork server stays" in first.stderr, first.stderr
    server = stayed(env)

    ended = run(other, "--warm", "train.py", env=env)

    assert "hydra" in server["packages"]
    assert "warm start:" in ended.stderr, ended.stderr
    # It was imported by the fork server that stayed, before the job's own was forked.
    assert f"by {server['pid']}\n" in ended.stdout


def test_nothing_of_a_job_holds_the_output_open(tmp_path: Path, place: Path) -> None:
    words = [*COMMAND, *WARM, "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(options()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        # A process that stays with this pipe would keep its reader for a quarter of an hour.
        said, _ = process.communicate(timeout=DEADLINE_S)

    assert b"a fork server stays" in said
    assert stayed()
