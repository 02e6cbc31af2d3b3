"""Fork servers that stay between runs: what makes a start warm or cold, who may use them, and how they end."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.processes import is_alive
from tests.harness import RUN_LIMIT_S, Job, script, wait_for
from tests.warm import command, own_place, run, states

WARM = ("-v", "--preload", "json,heavy", "--warm")
THREADS = {"OMP_NUM_THREADS": "1"}
# A job of one worker that prints what its fork server is, and what it finds; or that waits.
PROGRAM = """
import heavy, os, signal, sys
first = dict(entry.split("=", 1) for entry in open("/proc/self/environ").read().split("\\0") if entry)
debug, marker = os.environ.get("NCCL_DEBUG"), first["ELAUNCH_MARKER"]
print("printed", heavy.WORD, os.getppid(), sys.argv[1:], debug, len(marker), flush=True)
if "wait" in sys.argv:
    print("worker pid", os.getpid(), flush=True)
    signal.pause()
"""
OTHER = 4711

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where fork servers stay; a package that they import is installed beside."""
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "heavy.py").write_text("WORD = 'one'\n")
    with own_place(tmp_path / "run") as where, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.fspath(packages))
        script(tmp_path, PROGRAM)
        yield where


def again(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The next run of the program."""
    return run(folder, *WARM, "train.py", *args, env={**THREADS, **env})


def waiting(folder: Path) -> Job:
    return Job(folder, *WARM, "train.py", "wait", env=THREADS)


def first(folder: Path) -> int:
    """The pid of the fork server that a first run leaves."""
    ended = again(folder)
    assert "a warm fork server stays" in ended.stderr, ended.stderr
    (server,) = states()
    pid: int = server["pid"]
    return pid


def printed(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """What the worker logged after `printed`."""
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()[1:]


def cold(logged: str) -> str:
    """Why the job started cold."""
    found = re.search(r"cold start: (.*)", logged)
    assert found, logged
    return found[1]


def test_the_next_job_starts_from_it_with_an_environment_of_its_own(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    script(tmp_path, PROGRAM.replace("printed", "edited"))

    ended = again(tmp_path, "--lr", "1", NCCL_DEBUG="INFO")

    assert ended.stdout == f"edited one {pid} ['--lr', '1'] INFO 16\n", ended.stderr
    assert f"warm start: from the warm fork server left at {time.strftime('%H:')}" in ended.stderr
    assert "stays" not in ended.stderr
    assert place.stat().st_mode & 0o777 == 0o700
    assert [each["seconds_left"] > 0 for each in states()] == [True]


def test_each_thing_that_differs_makes_the_start_cold_and_the_one_after_it_warm(tmp_path: Path, place: Path) -> None:
    packages = tmp_path / "lib" / "site-packages"
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limited = partial(resource.setrlimit, resource.RLIMIT_CORE, (4096, hard))
    with Job(tmp_path, *WARM, "train.py", env=THREADS, preexec_fn=limited) as job:
        assert job.wait() == 0, job.output
    pid = states()[0]["pid"]

    def changed(why: str, word: str, **env: str) -> None:
        nonlocal pid
        ended = again(tmp_path, **env)
        assert re.search(why, cold(ended.stderr)), ended.stderr
        assert printed(ended)[0] == word
        before, (server,) = pid, states()
        pid = server["pid"]
        assert pid != before
        assert not is_alive(before)

    changed("the limit Max core file size is '.*', and was '4096 ", "one")
    changed("the variable MINE has another value", "one", MINE="yes")
    (packages / "heavy.py").write_text("WORD = 'two'\n")
    changed(rf"{packages}/heavy.py has changed", "two", MINE="yes")
    (packages / "new-1.0.dist-info").mkdir()
    changed(rf"{packages} has changed", "two", MINE="yes")
    script(tmp_path, "WORD = 'mine'", "heavy.py")
    ended = again(tmp_path, MINE="yes")
    assert cold(ended.stderr) == f"{tmp_path}/heavy.py has the name of a module that is loaded"
    assert printed(ended)[0] == "mine"


def test_a_job_whose_fork_server_is_killed_goes_on_with_another_which_stays(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    with waiting(tmp_path) as job:
        job.wait_for_output(r"worker pid \d+\n")
        assert list(place.iterdir()) == []
        os.kill(pid, signal.SIGKILL)
        job.wait_for_output(r"(?s)(worker pid \d+\n.*){2}")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output

    (server,) = states()
    os.kill(server["pid"], signal.SIGKILL)
    shown, ended = command(), again(tmp_path)

    assert server["pid"] != pid
    assert "was killed" in cold(ended.stderr)
    assert shown.stdout == cold(ended.stderr) + "\n"
    assert len(states()) == len(list(place.iterdir())) == 1


def test_status_shows_the_fork_server_and_stop_ends_it(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)

    shown, ended, after = command(), command("--stop"), command()

    assert re.match(
        rf"pid {pid}, since 20\d\d-.*, 1[45]\.\d min left\n  for train.py in {tmp_path}, with {sys.executable}\n"
        rf"  imported: json, heavy\n  socket: {place}/[0-9a-f]+\n",
        shown.stdout,
    )
    assert ended.stdout == "ended: 1 fork server\n"
    assert "no warm fork server runs" in after.stdout
    wait_for(lambda: not is_alive(pid), "it is gone")


@pytest.mark.parametrize("how", ["idle", "SIGTERM"])
def test_it_exits_when_idle_and_at_sigterm(tmp_path: Path, place: Path, how: str) -> None:
    ended = run(tmp_path, *WARM[:-1], "train.py", env={**THREADS, "ELAUNCH_WARM": "0.02" if how == "idle" else "9"})
    assert "a warm fork server stays" in ended.stderr, ended.stderr
    if how == "SIGTERM":
        os.kill(states()[0]["pid"], signal.SIGTERM)

    wait_for(lambda: states() == [], "it has ended", every_s=0.2)

    assert list(place.iterdir()) == []


@needs_root
def test_another_user_who_reaches_the_socket_is_refused(tmp_path: Path, place: Path) -> None:
    pid = first(tmp_path)
    (path,) = place.iterdir()
    ask = (
        f"import os, socket; os.chdir({os.fspath(place)!r}); os.setuid({OTHER}); s = socket.socket(1, 5);"
        f" s.connect({path.name!r}); print(s.recv(1000), s.recv(1000))"
    )
    path.chmod(0o666)
    place.chmod(0o711)

    logged = subprocess.run(
        [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_LIMIT_S
    ).stdout
    open_folder = again(tmp_path)
    place.chmod(0o700)

    assert "another user" in logged
    assert logged.endswith("b''\n")
    assert cold(open_folder.stderr) == f"{place} is not a folder only you can enter; remove it, or chmod 700 {place}"
    assert printed(again(tmp_path))[1] == str(pid)


@needs_root
def test_a_folder_or_a_socket_of_another_user_is_refused(tmp_path: Path, place: Path) -> None:
    first(tmp_path)
    (path,) = place.iterdir()
    command("--stop")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        os.seteuid(OTHER)
        listener.listen()
        os.seteuid(0)
        of_socket = again(tmp_path)
    path.unlink()
    os.chown(place, OTHER, -1)

    of_folder = again(tmp_path)

    os.chown(place, 0, -1)
    assert cold(of_socket.stderr) == f"{path} is a socket of the user with id {OTHER}; remove it"
    assert "no warm fork server stays" in of_socket.stderr
    assert cold(of_folder.stderr).startswith(f"{place} belongs to the user with id {OTHER}; ")
    assert printed(of_socket)[0] == printed(of_folder)[0] == "one"
