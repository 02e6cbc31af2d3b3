"""A scheduler's notice (SIGUSR1): whoever it reaches, workers are told once, in the way that they understand."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.processes import LIGHT, SAY, Watched
from tests.harness import script, slow, wait_for
from tests.nodes import needs_nodes

# In the shell of a job.
SLURM = {"SLURM_JOB_ID": "7"}
ON_SIGNAL = f"""{SAY}
def told(signum, frame):
    say(f"told by {{signal.Signals(signum).name}}", os.getpid())
    saving.append(signum)

saving = []
signal.signal(signal.NAME, told)
say("worker", os.getpid())
while not saving:
    signal.pause()
time.sleep(0.3)
sys.exit(0)
"""
SHELL = """\
trap 'echo "told by SIGUSR1 pid $$"; exit 0' USR1
echo "worker pid $$"
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("to_all", [False, True], ids=["agent", "all"])
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_python_program_is_told_once(tmp_path: Path, name: str, to_all: bool) -> None:
    script(tmp_path, ON_SIGNAL.replace("NAME", name))
    with Watched(tmp_path, *LIGHT, "--nproc-per-node", "2", "train.py", env=SLURM) as job:
        wait_for(lambda: len(job.pids("worker")) == 2, "2 workers")

        for pid in (*job.pids("worker"), job.fork_server().pid) if to_all else ():
            os.kill(pid, signal.SIGUSR1)
        job.signal(signal.SIGUSR1)

        assert job.wait() == 128 + signal.SIGUSR1
        assert job.stdout.count(f"told by {name}") == 2
        job.assert_nothing_is_left()


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_shell_may_catch_it_and_one_that_does_not_gets_sigterm(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.sh").write_text(SHELL.replace("USR1", name))
    with Watched(tmp_path, "--no-python", "sh", "train.sh", env=SLURM) as job:
        wait_for(lambda: job.pids("worker"), "the worker")

        job.signal(signal.SIGUSR1)

        assert job.wait() == 128 + signal.SIGUSR1
        assert job.stdout.count(f"told by SIG{name}") == 1


def test_who_names_the_signal_has_it_passed_on_as_it_is(tmp_path: Path) -> None:
    script(tmp_path, ON_SIGNAL.replace("NAME", "SIGTERM"))
    named = ("--signals-to-handle", "SIGUSR1,SIGTERM")
    with Watched(tmp_path, *LIGHT, *named, "train.py", env=SLURM) as job:
        wait_for(lambda: job.pids("worker"), "the worker")

        job.signal(signal.SIGUSR1)

        assert job.wait() == 128 + signal.SIGUSR1
        assert "told by" not in job.stdout


@needs_nodes
@pytest.mark.parametrize(
    ("name", "max_restarts"), [("SIGUSR1", "3"), slow("SIGUSR1", "0"), slow("SIGTERM", "3"), ("SIGTERM", "0")]
)
def test_a_node_that_hears_of_it_from_another_first_tells_its_workers_the_same(
    tmp_path: Path, name: str, max_restarts: str
) -> None:
    """As in a large job, where the slowest node has the notice long after the first one's leave."""
    program = tmp_path / "train.py"
    program.write_text(ON_SIGNAL.replace("NAME", name))
    with Cluster(tmp_path, 2) as cluster:
        options = ("--max-restarts", max_restarts)
        cluster.start(0, 1, nnodes="2", program=program, options=options, env=SLURM)
        first, second = cluster.agents[0], cluster.agents[1]
        wait_for(lambda: first.pids("worker") and second.pids("worker"), "2 workers")

        first.signal(signal.SIGUSR1)

        assert first.wait() == 128 + signal.SIGUSR1
        wait_for(lambda: "told by" in second.stdout, "the other worker is told")
        second.signal(signal.SIGUSR1)
        second.wait()
        assert [agent.stdout.count(f"told by {name}") for agent in (first, second)] == [1, 1]
        assert [agent.stdout.count("told by") for agent in (first, second)] == [1, 1]
