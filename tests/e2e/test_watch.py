"""`elaunch status`, `top` and `stacks` beside real jobs: on their host, and from elsewhere through the store."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.harness import COMMAND, DEADLINE_S, Job, environment, free_ports, script, wait_for

pytestmark = pytest.mark.usefixtures("without_torch")

TRAIN = """
import os, pathlib, time
from elaunch.trainer import link

step = 0
while pathlib.Path("hold").exists():
    step += 1
    if step == 3 and pathlib.Path("fail").exists() and os.environ["RANK"] == "1":
        pathlib.Path("fail").unlink()
        raise SystemExit(7)
    link.report(step)
    time.sleep(0.1)
"""
TOKEN = "a token for the tests of status"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


def as_user(uid: int) -> tuple[str, ...]:
    """What makes a command another user's. The user may read what root has installed, and is root in nothing else."""
    rights = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    return ("setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *rights)


def asked(
    *words: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    patience_s: float = 0.0,
    **popen: Any,
) -> subprocess.CompletedProcess[str]:
    """One call of the command, to its end. It waits for answers by the store for `patience_s` if that is given."""
    return subprocess.run(
        [*prefix, *(patient(patience_s) if patience_s else COMMAND), *words],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment(env),
        check=False,
        **popen,
    )


def patient(seconds: float) -> tuple[str, ...]:
    """The command, in which a node that is well has time for its answer however busy the host is."""
    module = "elaunch.launcher.inspect.job_source"
    settings = f"import {module}\n{module}.patience_s.__defaults__ = ({seconds},)"
    return (sys.executable, "-c", f"{settings}\nfrom elaunch.launcher.cli import main\nmain()")


def status_of(run_id: str, **options: Any) -> dict[str, Any]:
    """What `elaunch status --json` says of that job; empty as long as it says something else."""
    ended = asked("status", run_id, "--json", **options)
    return json.loads(ended.stdout) if ended.returncode == 0 else {}


def name_of(tmp_path: Path) -> str:
    """A run id that no other test on this machine has."""
    return f"{tmp_path.name}-{os.getpid()}"


@contextmanager
def running(folder: Path, *words: str, ranks: int = 2, fails: bool = False, **options: Any) -> Iterator[Job]:
    """A job that trains until `hold` is gone."""
    script(folder, TRAIN)
    (folder / "hold").touch()
    if fails:
        (folder / "fail").touch()
    with Job(folder, "--no-preload", "--nproc-per-node", str(ranks), *words, "train.py", **options) as job:
        yield job


@contextmanager
def two_nodes(folder: Path, run_id: str, ranks: int = 1) -> Iterator[tuple[Job, Job, str]]:
    """Two agents of one job with the head's own store, and the store's address."""
    (port,) = free_ports(1)
    place = f"127.0.0.1:{port}"
    words = ("--nnodes", "2", "--rdzv-endpoint", place, "--run-id", run_id, "--local-addr", "127.0.0.1")
    # A node that a test stops is not to be lost before it was asked for.
    words = (*words, "--rdzv-conf", "lease_ttl=180")
    env = {"ELAUNCH_TOKEN": TOKEN, "HOME": str(folder)}
    with ExitStack() as stack:
        # The first agent comes last in the network, so the second has rank 0.
        places = (("--topology", rack) for rack in ("rack10.s1", "rack9.s1"))
        one, two = (stack.enter_context(running(folder, *words, *each, ranks=ranks, env=env)) for each in places)
        yield one, two, place


def trains(run_id: str, ranks: int, **options: Any) -> dict[str, Any]:
    """The status once all ranks have reported steps for long enough to have a step time."""

    def found() -> dict[str, Any]:
        status = status_of(run_id, **options)
        return status if sum(rank["step_s"] is not None for rank in status.get("ranks", ())) == ranks else {}

    # Steps are read once a second, and each question is an interpreter of its own.
    return wait_for(found, f"{ranks} ranks of {run_id} with steps", every_s=2.5)


def test_status_shows_ranks_steps_the_last_failure_and_what_is_left_of_the_budget(tmp_path: Path) -> None:
    run_id = name_of(tmp_path)
    began_s = time.monotonic()
    with running(tmp_path, "--run-id", run_id, fails=True) as job:
        job.wait_for_output("generation 1")
        status = trains(run_id, 2)
        took_s = time.monotonic() - began_s
        text = asked("status", run_id).stdout

    assert (status["run_id"], status["state"], status["world_size"]) == (run_id, "running", 2)
    assert status["generation"]["number"] == 1
    assert status["restarts"] == {"used": 1, "max": 3, "left": 2, "window_s": None}
    assert status["last_failure"]["rank"] == 1
    assert status["last_failure"]["code"] == 7
    assert 0 <= status["last_failure"]["ago_s"] < took_s + 1
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert all(0.08 < rank["step_s"] < took_s and rank["state"] == "running" for rank in status["ranks"]), status[
        "ranks"
    ]
    assert text.startswith(f"job {run_id}: running, generation 1 for ")
    for words in (
        "1 node, 2 ranks",
        "2 of 3 restarts left",
        "rank 1 (local rank 1 on ",
        "ms per step",
        "in generation 0",
    ):
        assert words in text


def test_two_nodes_are_queried_from_a_third_host_with_the_token(tmp_path: Path) -> None:
    run_id, elsewhere = name_of(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    with two_nodes(tmp_path, run_id) as (one, two, place):
        there = ("--rdzv-endpoint", place)
        patiently: dict[str, Any] = {"patience_s": DEADLINE_S}
        with_token = {"ELAUNCH_TOKEN": TOKEN, "HOME": str(elsewhere)}
        without = {"HOME": str(elsewhere)}
        one.wait_for_output("generation 0")
        # From the job's host nothing needs to be typed, not even the token.
        near = trains(run_id, 2, env=without)

        named = (*there, "--run-id", run_id, "--json")
        far = json.loads(asked("status", *named, env=with_token, cwd=elsewhere, **patiently).stdout)
        refused = asked("status", *there, run_id, env=without)
        unknown = asked("status", *there, "another", env=with_token)
        stacks = asked("stacks", *there, run_id, env=with_token, **patiently)
        two.signal(signal.SIGSTOP)
        partly = json.loads(asked("status", *named, env=with_token, patience_s=10.0).stdout)
        # Where its pid means something, the user hears what to do.
        beside = asked("status", run_id, "--json", env=without)
        two.signal(signal.SIGCONT)

        for status in (near, far):
            assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
            assert {rank["pid"] for rank in status["ranks"]} == {rank["pid"] for rank in near["ranks"]}
            places = [(node["pid"], node["topology"]) for node in status["nodes"]]
            assert places == [(two.process.pid, "rack9.s1"), (one.process.pid, "rack10.s1")]
            assert status["notes"] == []
        assert (refused.returncode, unknown.returncode) == (3, 3)
        assert "requires its token" in refused.stderr
        assert "has no job another" in unknown.stderr
        assert TOKEN not in near.__repr__() + far.__repr__() + refused.stderr
        # A rank may look just now whether it goes on.
        assert re.match(rf"job {run_id}: 2 ranks at (the same place|2 places)\n  ranks? 0", stacks.stdout), (
            stacks.stdout
        )
        assert "(train.py:" in stacks.stdout
        (silent,) = [node for node in partly["nodes"] if node["silent"]]
        assert "did not answer within 10 s; its lease still holds" in silent["silent"]
        assert [node["pid"] for node in partly["nodes"] if not node["silent"]] == [one.process.pid]
        assert f"the elaunch with pid {two.process.pid} is stopped, by SIGSTOP or a debugger" in beside.stderr
        # The job did not notice the questions.
        (tmp_path / "hold").unlink()
        assert (one.wait(), two.wait()) == (0, 0)


@as_root
def test_without_arguments_a_user_finds_the_own_jobs_alone(tmp_path: Path) -> None:
    # pytest's folders are closed to other users.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    (folder / "two").mkdir()
    # Users that no other test and no other job on this machine has. They may read what root has installed.
    one, other = (as_user(47110 + 2 * os.getpid() + number) for number in range(2))
    env = {"HOME": str(folder), "TMPDIR": "/tmp"}
    try:
        nothing = asked("status", env=env, prefix=one)
        with running(folder, env=env, prefix=one) as job:
            job.wait_for_output("generation 0")
            mine = wait_for(lambda: asked("status", env=env, prefix=one).stdout, "the user finds the job")
            others = asked("status", env=env, prefix=other)
            run_id = re.match(r"job (\w+): running", mine)[1]  # type: ignore[index]
            roots = asked("status", run_id, env=env)
            with running(folder / "two", "--run-id", "second", env=env, prefix=one) as second:
                second.wait_for_output("generation 0")

                def several() -> str:
                    refused = asked("status", env=env, prefix=one)
                    return refused.stderr if refused.returncode == 2 else ""

                both = wait_for(several, "the user finds both jobs")
                top = asked("top", env=env, prefix=one)
                refused = asked("stop", "sec", env=env, prefix=one)
    finally:
        shutil.rmtree(folder)

    assert nothing.returncode == others.returncode == 3
    assert "no job of yours runs on this host" in nothing.stderr
    assert "no job of yours runs on this host" in others.stderr
    assert "cannot be queried" not in others.stderr, "it looks at its own only"
    assert roots.returncode == 0
    assert f"{run_id} (pid {job.process.pid})" in both
    assert "second (pid " in both
    assert top.returncode == 2
    assert "several jobs run here" in top.stderr
    assert refused.returncode == 3
    assert "no job sec runs on this host; these run: " in refused.stderr


class Screen:
    """A command at a terminal of its own."""

    def __init__(self, *words: str, lines: int = 24, columns: int = 100) -> None:
        self.raw = b""
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment({"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)}),
        )
        os.close(theirs)
        os.set_blocking(self._fd, False)

    def text(self) -> str:
        """What is on the screen now."""
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except (BlockingIOError, OSError):
                break
            self.raw += data
            self._stream.feed(data)
        return "\n".join(line.rstrip() for line in self._screen.display)

    def is_as_before(self) -> bool:
        """Whether the terminal shows the shell's screen and cursor, and echoes whole lines."""
        self.text()
        # A terminal has the same modes at both ends.
        modes = termios.tcgetattr(self._fd)[3]
        is_shell_s = self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h") >= 0
        has_cursor = self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")
        return is_shell_s and has_cursor and bool(modes & termios.ICANON) and bool(modes & termios.ECHO)

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._fd)


def test_top_redraws_the_job_each_second_until_q_or_a_signal_and_restores_the_terminal(
    tmp_path: Path,
) -> None:
    run_id = name_of(tmp_path)
    with running(tmp_path, "--run-id", run_id) as job:
        job.wait_for_output("generation 0")
        screen = Screen("top", run_id)
        try:
            first = wait_for(lambda: re.search(r"^ *step +(\d+)", screen.text(), re.MULTILINE), "a screen with steps")
            step = int(first[1])
            wait_for(
                lambda: (
                    (found := re.search(r"^ *step +(\d+)", screen.text(), re.MULTILINE)) and int(found[1]) >= step + 15
                ),
                "the steps go on",
            )
            text = screen.text()
            screen.type(b"q")
            assert screen.process.wait(DEADLINE_S) == 0
            assert screen.is_as_before()
        finally:
            screen.close()
        screen = Screen("top", run_id)
        try:
            wait_for(lambda: "q quits" in screen.text(), "a screen")
            assert not screen.is_as_before()
            screen.process.send_signal(signal.SIGTERM)
            assert screen.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
            assert screen.is_as_before()
            assert "Traceback" not in screen.text()
        finally:
            screen.close()

    assert text.startswith(f"job {run_id}: running, generation 0 for ")
    assert "3 of 3 restarts left" in text
    assert re.search(r"^ ?rank +host +pid +state +step +step time +last report", text, re.MULTILINE)
    assert len(re.findall(r"^ ?[01] .* running ", text, re.MULTILINE)) == 2
    assert "q quits" in text


def test_stacks_groups_ranks_by_where_they_are(tmp_path: Path) -> None:
    run_id = name_of(tmp_path)
    train = """
import os, time

def computes():
    while True:
        pass

def waits():
    time.sleep(1000)

print("here", flush=True)
computes() if os.environ["RANK"] == "1" else waits()
"""
    script(tmp_path, train)
    with Job(tmp_path, "--no-preload", "--nproc-per-node", "3", "--run-id", run_id, "train.py") as job:
        wait_for(lambda: job.stdout.count("here") == 3, "the ranks are there")

        text = asked("stacks", run_id).stdout
        found = json.loads(asked("stacks", run_id, "--json").stdout)

    assert text.startswith(f"job {run_id}: 3 ranks at 2 places\n  ranks 0, 2: waits (train.py:9)")
    assert "  rank 1: computes (train.py:" in text
    assert [group["ranks"] for group in found["groups"]] == [[0, 2], [1]]
    assert found["groups"][0]["stack"]["threads"][0]["frames"][0]["function"] == "waits"


def test_a_job_is_restarted_and_stopped_from_its_host_and_from_elsewhere(tmp_path: Path) -> None:
    run_id = name_of(tmp_path)
    there: dict[str, Any] = {"env": {"ELAUNCH_TOKEN": TOKEN}, "patience_s": DEADLINE_S}
    with two_nodes(tmp_path, run_id) as (one, two, place):
        for job in (one, two):
            job.wait_for_output("generation 0: 2 workers on 2 nodes")
        unnamed = asked("stop")
        here = asked("restart", run_id)
        for job in (one, two):
            job.wait_for_output(r"generation 1: 2 workers on 2 nodes \(elaunch restart was received")
        status = status_of(run_id)
        stop = asked("stop", run_id, "--rdzv-endpoint", place, **there)
        codes = [job.wait() for job in (one, two)]
        again = asked("stop", run_id)

    needed = "elaunch: stop needs the job's name or the pid of its elaunch; these run here: "
    assert unnamed.returncode == 2
    assert re.search(rf"{needed}.*{run_id}", unnamed.stderr), unnamed.stderr
    logged = f"elaunch: job {run_id}: all workers stop, and start again as generation 1\n"
    assert (here.returncode, here.stdout) == (0, logged), here.stderr
    assert (status["restarts"]["used"], status["generation"]["kind"]) == (0, "restart")
    assert stop.returncode == 0, stop.stderr
    assert f"job {run_id} stops on all nodes: workers have 30 s to save; the job's exit code is 130" in stop.stdout
    assert codes == [130, 130]
    assert again.returncode == 3
    assert f"no job {run_id} runs on this host" in again.stderr
