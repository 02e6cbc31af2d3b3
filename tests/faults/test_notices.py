"""A scheduler's notice (SIGUSR1): whichever process gets it, workers are told once, in the way that they handle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, LightCluster
from tests.faults.processes import LIGHT, SAY, Light
from tests.harness import script, slow, wait_for
from tests.nodes import needs_nodes

# Variables of the shell of a Slurm job.
SLURM = {"SLURM_JOB_ID": "7"}
ON_SIGNAL = f"""{SAY}
def told(signum, frame):
    say(f"told by {{signal.Signals(signum).name}}", os.getpid())
    saving.append(signum)

saving = []
NAMES = sys.argv[1:]
signal.signal(getattr(signal, NAMES[RANK % len(NAMES)]), told)
say("worker", os.getpid())
while not saving:
    signal.sigtimedwait([], 0.1)  # not pause(): it would miss a signal that comes just before it
time.sleep(0.3)
sys.exit(0)
"""


@pytest.mark.parametrize("to_all", [slow(False), True], ids=["agent", "all"])
def test_a_python_program_is_told_once_in_the_way_that_it_understands(tmp_path: Path, to_all: bool) -> None:
    script(tmp_path, ON_SIGNAL)
    with Light(tmp_path, "--nproc-per-node", "2", "train.py", "SIGUSR1", "SIGTERM", env=SLURM) as job:
        wait_for(lambda: len(job.pids("worker")) == 2, "2 workers")

        for pid in (*job.pids("worker"), job.fork_server().pid) if to_all else ():
            os.kill(pid, signal.SIGUSR1)
        job.signal(signal.SIGUSR1)

        assert job.wait() == 128 + signal.SIGUSR1
        told = [(name, pid) for name in ("SIGUSR1", "SIGTERM") for pid in job.pids(f"told by {name}")]
        assert [name for name, _ in told] == ["SIGUSR1", "SIGTERM"]
        assert {pid for _, pid in told} == set(job.pids("worker"))
        job.assert_nothing_is_left()


@needs_nodes
@pytest.mark.parametrize(
    ("name", "max_restarts"), [("SIGUSR1", "3"), slow("SIGUSR1", "0"), slow("SIGTERM", "3"), slow("SIGTERM", "0")]
)
def test_a_node_that_hears_of_it_from_another_first_tells_its_workers_the_same(
    tmp_path: Path, name: str, max_restarts: str
) -> None:
    """In a large job the slowest node gets the notice long after the first node has left."""
    program = tmp_path / "train.py"
    program.write_text(ON_SIGNAL)
    with LightCluster(tmp_path, 2) as cluster:
        meet = ("--nnodes", "2", "--rdzv-endpoint", cluster.endpoints, "--rdzv-id", "job")
        for node in range(2):
            # This program's arguments are its own, so type the command here.
            cluster.type(node, *meet, *LIGHT, *PATIENT, "--max-restarts", max_restarts, str(program), name, env=SLURM)
        first, second = cluster.agents[0], cluster.agents[1]
        wait_for(lambda: first.pids("worker") and second.pids("worker"), "2 workers")

        first.signal(signal.SIGUSR1)

        assert first.wait() == 128 + signal.SIGUSR1
        wait_for(lambda: "told by" in second.stdout, "the other worker is told")
        second.signal(signal.SIGUSR1)
        second.wait()
        assert [agent.stdout.count(f"told by {name}") for agent in (first, second)] == [1, 1]
        assert [agent.stdout.count("told by") for agent in (first, second)] == [1, 1]
