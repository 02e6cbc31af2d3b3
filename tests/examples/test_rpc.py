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

from tests.harness import REPOSITORY, Job, finished, wait_for
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

    logged = "".join(agent.output for agent in left)
    assert re.search(r"restored step (?!1?\d )\d+ from memory", logged), logged
    found = re.findall(r"((?:parameters|table) [0-9a-f ]+)$", logged, re.MULTILINE)
    assert sorted(found) == sorted(expected)
