"""The programs of examples/rpc: each runs, and goes on after the kill of a process as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.examples.running import struck_once
from tests.harness import REPOSITORY, Job, finished, script, wait_for
from tests.nodes import needs_nodes

EXAMPLES = REPOSITORY / "examples" / "rpc"
# Survivors that have nothing to save must end by the first signal, however busy the machine is: so long nobody kills
# them. A timeout of RPC is a minute.
PATIENT, GONE_S = ("--failure-grace", "50"), 45.0


@dataclass(frozen=True)
class Program:
    """One program, how it is started, and which ranks have which role."""

    name: str
    options: Sequence[str]
    args: Sequence[str]
    ranks: dict[str, int]

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.options, str(EXAMPLES / self.name), *self.args)


PS = ("--role", "ps=1,trainer=2")
PS_RANKS = {"ps": 0, "trainer": 2}
SERVER = Program("parameter_server.py", PS, ("--steps", "150"), PS_RANKS)
HYBRID = Program("hybrid.py", PS, ("--steps", "150"), PS_RANKS)
AUTOGRAD = Program("distributed_autograd.py", ("--nproc-per-node", "2"), ("--steps", "150"), {"driver": 0, "other": 1})
MODULES = Program("remote_module.py", ("--nproc-per-node", "3"), ("--steps", "150"), {"driver": 0, "other": 2})
GAMES = Program("reinforce.py", ("--role", "agent=1,observer=2"), ("--rounds", "40"), {"agent": 0, "observer": 2})
ALL = (SERVER, HYBRID, AUTOGRAD, MODULES, GAMES)


def timeline(folder: Path) -> list[dict[str, Any]]:
    """The events of the run's timeline so far."""
    paths = list(folder.glob("logs/*_*/timeline.jsonl"))
    lines = paths[0].read_text().splitlines(keepends=True) if paths else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def pid_of(folder: Path, rank: int) -> int:
    forked = [e for e in timeline(folder) if e["event"] == "forked" and e["rank"] == rank]
    return int(forked[-1]["pid"])


def ends(job: Job) -> list[str]:
    """The lines about the final state, without prefixes."""
    return re.findall(r"^\[\d+\] ((?:parameters|table) [0-9a-f ]+)$", job.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each program says at its end if nothing fails; filled by the tests."""
    return {}


def end_of(program: Program, unfailed: dict[str, list[str]], folder: Path) -> list[str]:
    if program.name not in unfailed:
        (folder / "unfailed").mkdir()
        job = finished(folder / "unfailed", *program.words)
        assert job.code == 0, job.output
        unfailed[program.name] = ends(job)
        assert unfailed[program.name], job.output
    return unfailed[program.name]


def test_calls_references_and_late_answers(tmp_path: Path) -> None:
    job = finished(tmp_path, "--nproc-per-node", "2", str(EXAMPLES / "basics.py"))

    assert job.code == 0, job.output
    assert "[0] default0: sums [2.0, 2.0] from 2 processes" in job.stdout
    assert "[0] default0: the counter on default1 has 10" in job.stdout
    assert [f"[{rank}] default{rank}: the sum of all ranks is 1" in job.stdout for rank in (0, 1)] == [True, True]


@pytest.mark.slow
def test_after_the_kill_of_a_process_the_calls_are_answered_as_before(tmp_path: Path) -> None:
    # Rank 1 has the counter by then, and rank 0 may wait for it in a call.
    again = struck_once(tmp_path, "rpc/basics.py", "result = rpc.rpc_sync(")

    assert "default0: the counter on default1 has 10" in again
    assert [f"default{rank}: the sum of all ranks is 1" in again for rank in (0, 1)] == [True, True]


CASES = [(program, role) for program in ALL for role in program.ranks]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "role"), CASES, ids=[f"{each.name}-{role}" for each, role in CASES])
def test_the_death_of_a_process_changes_nothing_of_the_result(
    program: Program, role: str, unfailed: dict[str, list[str]], tmp_path: Path
) -> None:
    expected = end_of(program, unfailed, tmp_path)

    with Job(tmp_path, "--log-dir", "logs", *PATIENT, *program.words) as job:
        job.wait_for_output(r"^\[\d\] step 20: ")
        os.kill(pid_of(tmp_path, program.ranks[role]), signal.SIGKILL)
        assert job.wait() == 0, job.output

    assert f"rank {program.ranks[role]} (local rank" in job.output
    assert "was killed by SIGKILL in generation 0" in job.output
    assert "(restart 1 of 3)" in job.output or "; restart 1 of 3)" in job.output
    assert ends(job) == expected, job.output
    if program is not MODULES:
        # Its checkpoint is of some steps before.
        # A server that is killed between a step's end and its copy repeats that step: no trainer has seen it.
        assert re.search(r"(?:0 steps are|1 step is) repeated|goes on after step (?!1\d\b)\d\d", job.output), job.output
    first = [e for e in timeline(tmp_path) if e["generation"] == 0 and e["event"] == "exited"]
    assert len(first) == len({e["rank"] for e in timeline(tmp_path) if e["event"] == "forked"})
    moments = [e["monotonic_s"] for e in first]
    assert max(moments) - min(moments) < GONE_S, job.output


# In generation 0 ranks 0 and 1 wait: for all at the end, or for each other in a call. Both processes of the call live.
WAITING = """
import os, sys, time
from torch.distributed import rpc

def wait():
    time.sleep(1000)

rank, first = int(os.environ["RANK"]), os.environ["ELAUNCH_GENERATION"] == "0"
options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
print("has joined", flush=True)
if first and rank == 2:
    time.sleep(1000)
if first and sys.argv[1] == "call":
    rpc.rpc_sync(f"worker{1 - rank}", wait)
rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["shutdown", "call"])
def test_processes_that_wait_in_rpc_end_by_the_first_signal(where: str, tmp_path: Path) -> None:
    script(tmp_path, WAITING)

    with Job(tmp_path, "--log-dir", "logs", *PATIENT, "--nproc-per-node", "3", "train.py", where) as job:
        for rank in range(3):
            job.wait_for_output(rf"^\[{rank}\] has joined")
        os.kill(pid_of(tmp_path, 2), signal.SIGKILL)
        assert job.wait() == 0, job.output

    ended = {e["rank"]: e["code"] for e in timeline(tmp_path) if e["generation"] == 0 and e["event"] == "exited"}
    # 1: its call has failed, since the other process of it was gone.
    assert ended[2] == -signal.SIGKILL
    assert {ended[0], ended[1]} <= {-signal.SIGTERM, 1}, job.output
    assert not [e for e in timeline(tmp_path) if e["event"] == "killing"]


@pytest.mark.slow
@pytest.mark.parametrize("program", [SERVER, HYBRID, GAMES], ids=lambda each: each.name)
def test_after_a_stop_the_same_command_goes_on_from_the_disk(
    program: Program, unfailed: dict[str, list[str]], tmp_path: Path
) -> None:
    expected = end_of(program, unfailed, tmp_path)

    with Job(tmp_path, "--log-dir", "logs", *program.words) as job:
        job.wait_for_output(r"^\[\d\] step 20: ")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143, job.output
    stopped = re.search(r"stopped after step (\d+)", job.output)
    assert stopped, job.output
    again = finished(tmp_path, *program.words)

    assert again.code == 0, again.output
    assert f"restored step {stopped[1]} from the checkpoint" in again.output, again.output
    assert ends(again) == expected


@pytest.mark.slow
@needs_nodes
@pytest.mark.parametrize("victim", ["ps", "trainer"])
def test_a_server_and_its_trainers_on_two_nodes_with_an_agent_each(
    victim: str, unfailed: dict[str, list[str]], tmp_path: Path
) -> None:
    from tests.faults.cluster import PRELOAD, Cluster

    expected = end_of(HYBRID, unfailed, tmp_path)
    # A host's own name means loopback to itself, as Debian installs it.
    with Cluster(tmp_path, 2, head=True, own_name_is_loopback=True) as cluster:
        for index, role in enumerate((("ps", "1"), ("trainer", "2"))):
            words = ("--nnodes", "2", "--rdzv-endpoint", cluster.endpoints, "--role", role[0], "--nproc-per-node")
            checkpoints = ("--checkpoints", str(tmp_path / "checkpoints"))
            env = {"HOME": str(tmp_path), "ELAUNCH_TOKEN": "0123456789abcdef0123456789abcdef"}
            program = (str(EXAMPLES / HYBRID.name), *HYBRID.args, *checkpoints)
            cluster.type(index, *words, role[1], "--log-dir", "logs", *PRELOAD, *program, env=env)
        ps, trainers = cluster.agents[0], cluster.agents[1]
        trainers.wait_for_output(r"step 20: ")
        folder = tmp_path / cluster.nodes[0 if victim == "ps" else 1].name
        rank = next(e["rank"] for e in timeline(folder) if e["event"] == "forked")
        os.kill(pid_of(folder, rank), signal.SIGKILL)

        wait_for(lambda: ps.process.poll() is not None and trainers.process.poll() is not None, "both agents end")
        assert [ps.wait(), trainers.wait()] == [0, 0], ps.output + trainers.output

    assert "restored step" in trainers.output
    assert "0 steps are repeated" in trainers.output
    found = re.findall(r"((?:parameters|table) [0-9a-f ]+)$", ps.output + trainers.output, re.MULTILINE)
    assert sorted(found) == sorted(expected)


@pytest.mark.slow
@needs_nodes
def test_a_lost_trainers_node_is_replaced_while_the_others_wait_for_its_answers(tmp_path: Path) -> None:
    from tests.faults.cluster import PRELOAD, Cluster

    # The spare must be there in time.
    longer = replace(HYBRID, args=("--steps", "500"))
    expected = end_of(longer, {}, tmp_path)
    with Cluster(tmp_path, 4, head=True, own_name_is_loopback=True) as cluster:
        env = {"HOME": str(tmp_path), "ELAUNCH_TOKEN": "0123456789abcdef0123456789abcdef"}
        checkpoints = ("--checkpoints", str(tmp_path / "checkpoints"))

        def start(*indices: int) -> None:
            for index in indices:
                role = "trainer" if index else "ps"
                words = ("--nnodes", "3", "--rdzv-endpoint", cluster.endpoints, "--role", role, "--nproc-per-node", "1")
                program = (str(EXAMPLES / HYBRID.name), *longer.args, *checkpoints)
                cluster.type(index, *words, "--log-dir", "logs", *PRELOAD, *program, env=env)

        start(0, 1, 2)
        cluster.agents[0].wait_for_output("generation 0: 3 workers on 3 nodes")
        start(3)
        cluster.agents[3].wait_for_output("waiting as a spare")
        both = (cluster.agents[1], cluster.agents[2])
        wait_for(lambda: any("step 20: " in agent.output for agent in both), "step 20")
        assert not any("parameters" in agent.output for agent in both), "the job was too short"
        # No process of this node says goodbye to its peers.
        cluster.nodes[2].unplug()

        left = [cluster.agents[index] for index in (0, 1, 3)]
        assert [agent.wait(180) for agent in left] == [0, 0, 0], "".join(agent.output for agent in left)

    said = "".join(agent.output for agent in left)
    assert re.search(r"restored step (?!1?\d )\d+ from memory", said), said
    found = re.findall(r"((?:parameters|table) [0-9a-f ]+)$", said, re.MULTILINE)
    assert sorted(found) == sorted(expected)
