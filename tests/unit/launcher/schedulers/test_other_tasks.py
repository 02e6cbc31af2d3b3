"""launcher.schedulers.other_tasks: how the tasks beside an agent wait for its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaunch.launcher.schedulers import other_tasks
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.launcher.schedulers.other_tasks import _address, hold_other_tasks
from tests.harness import DEADLINE_S, environment, wait_for

WAIT = """
import sys
from elaunch.launcher.schedulers.other_tasks import wait_for_agent
from elaunch.launcher.schedulers import other_tasks
from elaunch.launcher.schedulers.facts import Cluster
print("begins", flush=True)
sys.exit(wait_for_agent(Cluster("Slurm", run_id=sys.argv[1], task=1, tasks=2), print, float(sys.argv[2])))
"""


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent waits long enough for tasks whose interpreters take their time to start."""
    monkeypatch.setattr(other_tasks, "_SEEN_S", DEADLINE_S)


def companion(run_id: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAIT, run_id, str(DEADLINE_S)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def test_a_task_beside_the_agent_stays_until_that_has_ended_whatever_signal_comes() -> None:
    run_id = f"test-{os.getpid()}"
    waiting = companion(run_id)
    assert waiting.stdout
    waiting.stdout.readline()
    # Of MPI's processes on a node, only the agent may know the node's index.
    agent = Cluster("Open MPI", node_index=0, run_id=run_id, tasks=2)
    with hold_other_tasks(agent, print):
        wait_for(lambda: "@" + _address(agent)[1:] in connected(), "the task is connected")

        waiting.terminate()
        waiting.send_signal(10)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.3)

    assert waiting.wait(DEADLINE_S) == 0
    waiting.stdout.close()


def connected() -> list[str]:
    """The names of unix sockets with somebody connected, or waiting to be accepted (state 3 or 2)."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [fields[7] for fields in lines if len(fields) > 7 and fields[5] in ("02", "03")]


# Another user of the host, who connects to the name in argv. It prints a line when it has done so.
STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
held = socket.socket(socket.AF_UNIX)
held.connect("\\0" + sys.argv[1])
print("done", flush=True)
sys.stdin.read()
"""


@contextmanager
def stranger(name: str) -> Iterator[None]:
    command = [sys.executable, "-c", STRANGER, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as other:
        assert other.stdout
        assert other.stdout.readline() == "done\n"
        yield
        other.communicate(timeout=DEADLINE_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user too")
def test_a_stranger_who_knows_the_name_is_taken_for_none_of_the_other_tasks() -> None:
    cluster = Cluster("Slurm", run_id=f"known-{os.getpid()}", tasks=2)
    with hold_other_tasks(cluster, print), stranger(_address(cluster)[1:]):
        waiting = companion(str(cluster.run_id))
        assert waiting.stdout
        waiting.stdout.readline()

    # The agent has waited for this task.
    output, _ = waiting.communicate(timeout=DEADLINE_S)
    assert (waiting.returncode, output) == (0, "")
