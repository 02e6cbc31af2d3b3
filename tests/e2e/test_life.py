"""A job from its start to its end: all-reduce, and restart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import LIGHT, Job, finished, free_ports, records, script, slow
from tests.standin import WITH_TORCH
from tests.warm import SharedStart

pytestmark = pytest.mark.usefixtures("without_torch")

ALL_REDUCE = """
import json, os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist

# Rank 0 is a client of the store too: where the agent did not host it, no process would.
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=150))
store.set(f"rank {os.environ['RANK']}", "here")
store.wait([f"rank {rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
names = ("ELAUNCH_GENERATION", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
logged = {name: os.environ[name] for name in names} | {"elastic": dist.is_torchelastic_launched()}
print("reduced", json.dumps({"rank": dist.get_rank(), "total": int(total), "pid": os.getpid(), **logged}))
dist.barrier()
if "kill" in sys.argv and logged["ELAUNCH_GENERATION"] == "0":
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
dist.destroy_process_group()
if "kill" not in sys.argv:
    own = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", f"tcp://localhost:{sys.argv[1]}", timedelta(seconds=150), **own)
    dist.all_reduce(total)
    print("own", json.dumps({"rank": dist.get_rank(), "total": int(total)}))
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[slow(1), 2, slow(4)])
def world(request: pytest.FixtureRequest) -> int:
    """The number of workers of a job in which nothing fails."""
    return int(request.param)


@pytest.fixture(scope="module", params=[slow(1), 2, slow(4)])
def failing_world(request: pytest.FixtureRequest) -> int:
    """The number of workers of a job in which one fails."""
    return int(request.param)


@pytest.fixture(scope="module")
def reduced_in(world: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `reduced` runs; its temporary files go below it."""
    folder = tmp_path_factory.mktemp("reduced")
    (folder / "temporary").mkdir()
    return folder


@pytest.fixture(scope="module")
def reduced(world: int, reduced_in: Path) -> Job:
    """A job in which nothing fails."""
    script(reduced_in, ALL_REDUCE)
    env = {"TMPDIR": str(reduced_in / "temporary"), **WITH_TORCH}

    return finished(
        reduced_in, "--nproc-per-node", str(world), "--log-dir", "logs", "train.py", str(free_ports(1)[0]), env=env
    )


@pytest.fixture(scope="module")
def restarted(failing_world: int, tmp_path_factory: pytest.TempPathFactory, torch_start: SharedStart) -> Job:
    """A job whose last worker is killed after an all-reduce, while the others wait for it in the next one."""
    folder = tmp_path_factory.mktemp("restarted")
    script(folder, ALL_REDUCE)

    # The job in which nothing fails has the default preload.
    options = ("--nproc-per-node", str(failing_world), "--max-restarts", "1")
    return finished(folder, *torch_start.options, *options, "train.py", "kill", env=torch_start.env)


class TestAllReduce:
    def test_every_rank_gets_the_sum_over_all_ranks(self, reduced: Job, world: int) -> None:
        logged = records(reduced, "reduced")

        assert sorted(worker["rank"] for worker in logged) == list(range(world)), reduced.output
        assert {worker["total"] for worker in logged} == {world * (world + 1) // 2}

    def test_a_job_whose_workers_all_exit_with_0_exits_with_0(self, reduced: Job) -> None:
        assert reduced.code == 0, reduced.output
        assert "FAILED" not in reduced.output

    def test_its_start_is_one_line_about_what_runs_and_where_its_output_is(
        self, reduced: Job, reduced_in: Path, world: int
    ) -> None:
        # Where an import takes long, a line says so.
        logged = re.sub(r"^elaunch: importing .*\n", "", reduced.stderr, flags=re.MULTILINE)
        first, *report = [line for line in logged.splitlines() if line.startswith("elaunch: ")]
        started = rf"elaunch: generation 0: {world} workers? \(the job starts\); output in ({reduced_in}/logs/\S+)"

        assert re.fullmatch(started, first)
        assert report == []

    def test_torch_sees_an_elastic_launch_whose_store_the_agent_hosts(self, reduced: Job, world: int) -> None:
        assert [worker["elastic"] for worker in records(reduced, "reduced")] == [True] * world

    def test_the_ranks_meet_at_a_store_of_their_own_too(self, reduced: Job, world: int) -> None:
        assert sorted(worker["rank"] for worker in records(reduced, "own")) == list(range(world)), reduced.output


def test_verbose_adds_what_was_chosen_and_quiet_leaves_warnings_errors_and_the_report(tmp_path: Path) -> None:
    script(tmp_path, "import os, sys; sys.exit(3 * (os.environ['ELAUNCH_GENERATION'] == '0'))")
    words = (*LIGHT, "--nproc-per-node", "1", "--max-restarts", "1", "train.py")

    logged = {way: finished(tmp_path, way, *words).stderr for way in ("-v", "-q")}

    assert re.search(r"^elaunch: OMP_NUM_THREADS=\d+$", logged["-v"], re.MULTILINE)
    assert "elaunch: generation 1: " in logged["-v"]
    failed, succeeded = logged["-q"].splitlines()
    assert re.match(r"elaunch: rank 0 .*exited with code 3", failed)
    assert succeeded == "elaunch: succeeded, 1 of 1 restarts used"


class TestRestart:
    def test_all_ranks_come_back_as_new_processes_and_reduce_again(self, restarted: Job, failing_world: int) -> None:
        world = failing_world
        generations = _by_generation(restarted)

        assert list(generations) == ["0", "1"]
        for workers in generations.values():
            assert sorted(worker["rank"] for worker in workers) == list(range(world))
            assert {worker["total"] for worker in workers} == {world * (world + 1) // 2}
        assert len({worker["pid"] for workers in generations.values() for worker in workers}) == 2 * world

    def test_the_ranks_of_a_generation_meet_at_one_address(self, restarted: Job) -> None:
        for workers in _by_generation(restarted).values():
            assert len({(worker["MASTER_ADDR"], worker["MASTER_PORT"]) for worker in workers}) == 1

    def test_a_new_generation_has_a_fresh_port(self, restarted: Job) -> None:
        before, after = _by_generation(restarted).values()

        assert before[0]["MASTER_PORT"] != after[0]["MASTER_PORT"]


def _by_generation(job: Job) -> dict[str, list[dict[str, object]]]:
    """The workers' records, by the generation that they belong to."""
    found: dict[str, list[dict[str, object]]] = {}
    for worker in records(job, "reduced"):
        found.setdefault(worker["ELAUNCH_GENERATION"], []).append(worker)
    return found
