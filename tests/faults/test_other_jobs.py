"""A process that a service starts for a worker has the agent's marker. It survives restarts and the job's end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elaunch.agent.guardian.guardian import VARIABLE
from tests.cgroups import kill_cgroup, make_cgroup
from tests.faults.processes import CHILDREN, SAY, Watched, is_alive
from tests.harness import LIGHT, script, slow, wait_for

OURS = ("sleep", "setsid", "daemon")
WAITS = f"""{SAY}{CHILDREN}
say(f"generation {{GENERATION}} worker", os.getpid())
signal.pause()
"""
# Moves a child to another cgroup, with the same environment, as `systemd-run --scope` does.
MOVES = f"""{SAY}{CHILDREN}
moved = subprocess.Popen(["sh", "-c", 'echo 0 >"$0/cgroup.procs"; exec sleep 600', sys.argv[1]])
say("moved", moved.pid)
new = subprocess.Popen(["unshare", "--fork", "--pid", "sleep", "600"])
say("namespace", new.pid)
say(f"generation {{GENERATION}} worker", os.getpid())
signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "inside"),
    [(LIGHT, "12"), (("--no-preload",), None), slow(LIGHT, None), slow(("--no-preload",), "12")],
    ids=["forked-from a job", "no-preload-from a shell", "forked-from a shell", "no-preload-from a job"],
)
def test_a_job_that_a_worker_has_handed_in_survives_its_agents_restarts_and_end(
    tmp_path: Path, how: tuple[str, ...], inside: str | None
) -> None:
    script(tmp_path, WAITS)
    env = {"SLURM_JOB_ID": inside} if inside else {}
    with Watched(tmp_path, *how, "--scheduler", "none", "train.py", env=env) as job:
        wait_for(lambda: job.pids("generation 0 worker"), "a worker")
        mine = [job.pids(name)[0] for name in OURS]
        # With sbatch, a daemon of the scheduler starts the job, with the worker's environment. The test does the same.
        inherited = psutil.Process(job.pids("sleep")[0]).environ()
        assert inherited[VARIABLE]
        with subprocess.Popen(["sleep", "600"], env={**inherited, "SLURM_JOB_ID": "13"}) as other:
            try:
                os.kill(job.pids("generation 0 worker")[0], signal.SIGKILL)
                wait_for(lambda: job.pids("generation 1 worker"), "its successor")
                after_restart = [is_alive(pid) for pid in (*mine, other.pid)]
                job.kill_agent()
                wait_for(lambda: not any(is_alive(job.pids(name)[1]) for name in OURS), "the guardian's sweep")

                assert after_restart == [False, False, False, True]
                assert is_alive(other.pid)
            finally:
                other.kill()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A cgroup with two child cgroups."""
    folder = make_cgroup(f"elaunch-tests-{os.getpid()}")
    if not folder:
        pytest.skip("no cgroup2 hierarchy that may be written, or a kernel before 5.14")
    for name in ("session", "scope"):
        (folder / name).mkdir()
    yield folder
    kill_cgroup(folder)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a pid namespace needs root and unshare")
def test_a_process_in_another_cgroup_survives_and_one_in_another_pid_namespace_does_not(
    tmp_path: Path, folder: Path
) -> None:
    script(tmp_path, MOVES)
    into = ("sh", "-c", 'echo 0 >"$0/cgroup.procs"; exec "$@"', str(folder / "session"))
    with Watched(tmp_path, *LIGHT, "train.py", str(folder / "scope"), prefix=into) as job:
        wait_for(lambda: job.pids("generation 0 worker"), "a worker")
        moved = psutil.Process(job.pids("moved")[0])
        wait_for(lambda: moved.name() == "sleep", "it has moved")
        unshare = psutil.Process(job.pids("namespace")[0])
        inner = wait_for(lambda: [p.pid for p in unshare.children() if p.name() == "sleep"], "the namespace's first")
        mine = [*(job.pids(name)[0] for name in (*OURS, "namespace")), *inner]
        assert VARIABLE in moved.environ()
        assert len(mine) == 5

        os.kill(job.pids("generation 0 worker")[0], signal.SIGKILL)
        wait_for(lambda: job.pids("generation 1 worker"), "its successor")

        assert [pid for pid in mine if is_alive(pid)] == []
        assert is_alive(moved.pid)
        moved.kill()
