"""The environment of a worker, compared with that of the real torchrun where torchrun sets the same variables."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch.launcher.host import detect
from tests.harness import LIGHT, RUN_LIMIT_S, Job, environment, finished, records, script, slow

SAY_ENVIRONMENT = """
import json, os, sys

print("found", json.dumps({"argv": sys.argv, **os.environ}))
"""

KEEP_ENVIRONMENT = """
import json, os, sys
from pathlib import Path

Path(os.environ["RANK"]).write_text(json.dumps({"argv": sys.argv, **os.environ}))
"""
NESTED = """
import os, subprocess, sys

if os.environ["RANK"] == "0":
    sys.exit(subprocess.call([sys.executable, "-m", "elaunch", "--preload", "json", "inner.py"]))
"""
TWO_WORKERS = ("--nproc-per-node", "2", "--max-restarts", "2", "train.py", "--lr", "3")

# Variables in which the two launchers cannot or should not agree.
DIFFERS = {
    "MASTER_ADDR": "torchrun gives a name, which clusters without DNS cannot resolve; we give the address",
    "MASTER_PORT": "a free one each time",
    "TORCHELASTIC_RUN_ID": "a new one each time",
    "TORCHELASTIC_ERROR_FILE": "below each one's own folder",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun's note to its own agent, which its workers see by accident",
    "ELAUNCH_GENERATION": "ours",
    "ELAUNCH_GENERATION_SECRET": "ours",
    "ELAUNCH_LINK": "ours",
    "ELAUNCH_MEMORY": "ours",
    "ELAUNCH_MARKER": "ours",
    "PET_LOG_FORMAT": "torchrun hands on what configured the job, also to the jobs inside it",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torchrun's is 1; here it is torch's own default, which aborts no collective",
    "OMP_NUM_THREADS": "torchrun's is 1; here the workers share the cores",
    "_": "the shell's",
}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What torchrun's workers find, by rank."""
    folder = tmp_path_factory.mktemp("torchrun")
    script(folder, KEEP_ENVIRONMENT)

    command = [sys.executable, "-m", "torch.distributed.run", *TWO_WORKERS]
    subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True, timeout=RUN_LIMIT_S)

    return _kept(folder)


@pytest.fixture(
    scope="module", params=[LIGHT, slow(()), slow(("--no-preload",))], ids=["forked", "with torch", "exec'd"]
)
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The environment of elaunch's workers, by rank."""
    folder = tmp_path_factory.mktemp("ours")
    script(folder, KEEP_ENVIRONMENT)

    with Job(folder, *request.param, *TWO_WORKERS) as job:
        job.wait()

    return _kept(folder)


class TestLikeTorchrun:
    # torchrun imports torch. A variable that a new torch sets is found here alone; the next test has a list.
    @pytest.mark.slow
    def test_every_variable_has_torchruns_name_and_value(
        self, torchrun: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]
    ) -> None:
        assert sorted(torchrun) == sorted(ours) == ["0", "1"]
        for rank, theirs in torchrun.items():
            assert _difference(theirs, ours[rank]) == "", f"rank {rank}"

    def test_each_rank_has_an_error_file_of_its_own(self, ours: dict[str, dict[str, Any]]) -> None:
        paths = [Path(worker["TORCHELASTIC_ERROR_FILE"]) for worker in ours.values()]

        assert all(path.is_absolute() and path.name == "error.json" for path in paths)
        assert paths[0] != paths[1]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of five workers, with variables of the shell and arguments of all kinds."""
    folder = tmp_path_factory.mktemp("five")
    script(folder, SAY_ENVIRONMENT)
    above = {"RANK": "17", "WORLD_SIZE": "64", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "9"}
    users = {"WANDB_MODE": "offline", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "3,5"}
    options = ("--nproc-per-node", "5", "--max-restarts", "2")
    arguments = ("--gpu=${local_rank}", "$HOME", "${other}", "5$$")

    return finished(folder, *LIGHT, *options, "train.py", *arguments, env={**above, **users})


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of two workers with a GPU each, and with variables that the user chose."""
    folder = tmp_path_factory.mktemp("virtual")
    script(folder, SAY_ENVIRONMENT)
    env = {"CUDA_VISIBLE_DEVICES": "3,5", "OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

    return finished(folder, *LIGHT, "--virtual-local-rank", "--nproc-per-node", "2", "train.py", env=env)


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, int]:
    """A job of one worker with a range of two ports, and the first of them, which is in use."""
    folder = tmp_path_factory.mktemp("lone")
    script(folder, SAY_ENVIRONMENT)
    first = _free_ports(2)[0]

    with socket.create_server(("127.0.0.1", first)):
        return finished(folder, *LIGHT, "--master-port", f"{first}:{first + 1}", "train.py"), first


@pytest.fixture(scope="module")
def by_variables(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job with torchrun's variables in place of options; one of them is on the command line too."""
    folder = tmp_path_factory.mktemp("by_variables")
    script(folder, SAY_ENVIRONMENT)
    env = {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "5", "PET_ROLE": "learner", "PET_RDZV_ID": "job-7"}

    return finished(folder, *LIGHT, "--role", "actor", "train.py", env=env)


def test_at_five_workers_ranks_and_sizes_are_right(five: Job) -> None:
    found = sorted(records(five, "found"), key=lambda worker: int(worker["RANK"]))

    assert len(found) == 5, five.output
    for rank, worker in enumerate(found):
        assert {name: worker[name] for name in _expected(0, 5)} == _expected(rank, 5)
        assert worker["MASTER_PORT"] == found[0]["MASTER_PORT"]


def test_what_the_user_exported_is_inherited_and_a_launcher_above_does_not_shine_through(five: Job) -> None:
    first = min(records(five, "found"), key=lambda worker: int(worker["RANK"]))

    assert (first["WANDB_MODE"], first["NCCL_DEBUG"]) == ("offline", "INFO")
    assert (first["RANK"], first["WORLD_SIZE"], first["TORCHELASTIC_RESTART_COUNT"]) == ("0", "5", "0")
    assert first["MASTER_PORT"] != "1"


def test_nccls_error_handling_is_on_unless_the_user_sets_it(five: Job, virtual: Job) -> None:
    assert {worker["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for worker in records(five, "found")} == {"3"}
    assert {worker["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for worker in records(virtual, "found")} == {"1"}


class TestThreads:
    def test_the_workers_share_the_cores(self, lone: tuple[Job, int], by_variables: Job, five: Job) -> None:
        for job, workers in ((lone[0], 1), (by_variables, 2), (five, 5)):
            share = max(1, detect(os.environ).cores // workers)

            assert {worker["OMP_NUM_THREADS"] for worker in records(job, "found")} == {str(share)}

    def test_the_users_choice_stays(self, virtual: Job) -> None:
        assert {worker["OMP_NUM_THREADS"] for worker in records(virtual, "found")} == {"7"}
        assert "OMP_NUM_THREADS" not in virtual.stderr


class TestVirtualLocalRank:
    def test_every_worker_is_local_rank_0_and_sees_the_gpu_that_is_its_own(self, virtual: Job) -> None:
        found = {worker["RANK"]: worker for worker in records(virtual, "found")}

        assert [found[rank]["LOCAL_RANK"] for rank in "01"] == ["0", "0"]
        assert [found[rank]["CUDA_VISIBLE_DEVICES"] for rank in "01"] == ["3", "5"]

    def test_fewer_visible_gpus_than_workers_is_a_usage_error(self, tmp_path: Path) -> None:
        script(tmp_path, SAY_ENVIRONMENT)

        job = finished(
            tmp_path,
            *(*LIGHT, "--virtual-local-rank", "--nproc-per-node", "2", "train.py"),
            env={"CUDA_VISIBLE_DEVICES": "3"},
        )

        assert job.code == 2
        assert "CUDA_VISIBLE_DEVICES=3 names 1" in job.stderr

    def test_without_it_the_visible_gpus_are_untouched(self, five: Job) -> None:
        found = {worker["RANK"]: worker for worker in records(five, "found")}

        assert [found[rank]["LOCAL_RANK"] for rank in "01234"] == ["0", "1", "2", "3", "4"]
        assert {worker["CUDA_VISIBLE_DEVICES"] for worker in found.values()} == {"3,5"}


def test_local_rank_in_the_arguments_is_replaced_for_each_worker(five: Job) -> None:
    found = {worker["RANK"]: worker["argv"][1:] for worker in records(five, "found")}

    assert found == {str(rank): [f"--gpu={rank}", "$HOME", "${other}", "5$"] for rank in range(5)}


class TestPort:
    """The port. test_life.py and test_programs.py test the ports of later generations."""

    def test_the_users_port_in_use_is_a_usage_error(self, tmp_path: Path) -> None:
        script(tmp_path, SAY_ENVIRONMENT)

        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            job = finished(tmp_path, *LIGHT, "--master-port", str(port), "train.py")

        assert job.code == 2, job.output
        assert f"port {port} is in use on 127.0.0.1" in job.stderr
        assert records(job, "found") == []

    def test_a_range_gives_its_first_free_port(self, lone: tuple[Job, int]) -> None:
        job, first = lone

        assert job.code == 0, job.output
        assert records(job, "found")[0]["MASTER_PORT"] == str(first + 1)


class TestTorchrunsVariables:
    def test_a_pet_variable_is_an_options_value(self, by_variables: Job) -> None:
        found = records(by_variables, "found")

        assert [worker["WORLD_SIZE"] for worker in found] == ["2", "2"]
        assert {worker["TORCHELASTIC_MAX_RESTARTS"] for worker in found} == {"5"}
        assert {worker["TORCHELASTIC_RUN_ID"] for worker in found} == {"job-7"}

    def test_the_command_line_wins_over_a_pet_variable(self, by_variables: Job) -> None:
        assert {worker["ROLE_NAME"] for worker in records(by_variables, "found")} == {"actor"}

    def test_a_job_that_a_worker_starts_is_a_job_of_its_own(self, tmp_path: Path) -> None:
        script(tmp_path, NESTED)
        script(tmp_path, SAY_ENVIRONMENT, "inner.py")
        of_two_nodes = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "no[1-2]"}
        env = {"PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": str(_free_ports(1)[0]), "PET_SCHEDULER": "none"}

        job = finished(tmp_path, *LIGHT, "train.py", env={**env, **of_two_nodes, "SLURM_STEP_ID": "0"})

        assert job.code == 0, job.output
        (inner,) = records(job, "found")
        assert inner["WORLD_SIZE"] == "1"
        assert not [name for name in inner if name.startswith("PET_")]
        assert inner["SLURM_JOB_ID"] == "7"


def _expected(rank: int, world: int) -> dict[str, str]:
    """torchrun's variables of one worker on the only node, as far as their values are known beforehand."""
    return {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world),
        "WORLD_SIZE": str(world),
        "ROLE_WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }


def _kept(folder: Path) -> dict[str, dict[str, Any]]:
    """The environments that the workers of KEEP_ENVIRONMENT wrote, by rank."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("[0-9]*")}


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The variables that only one has or that have other values, one per line, without those that may differ."""
    names = sorted((theirs.keys() | ours.keys()) - DIFFERS.keys())
    return "".join(
        f"{name}: torchrun {theirs.get(name)!r}, here {ours.get(name)!r}\n"
        for name in names
        if theirs.get(name) != ours.get(name)
    )


def _free_ports(count: int) -> list[int]:
    """Ports in a row without a listener."""
    for first in range(23000, 32000, count):
        held: list[socket.socket] = []
        try:
            held = [socket.create_server(("127.0.0.1", port)) for port in range(first, first + count)]
        except OSError:
            continue
        finally:
            for server in held:
                server.close()
        return list(range(first, first + count))
    raise AssertionError("no free ports")


WAITS = """
import os, pathlib, time
print("rank", os.environ["RANK"], "at", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
while not pathlib.Path("enough").exists():
    time.sleep(0.05)
"""


@pytest.mark.usefixtures("without_torch")
def test_a_job_of_one_node_listens_on_loopback_addresses_alone(tmp_path: Path) -> None:
    script(tmp_path, WAITS)
    with Job(tmp_path, "--no-preload", "--nproc-per-node", "2", "--metrics-port", "0", "train.py") as job:
        master = int(job.wait_for_output(r"rank 1 at 127\.0\.0\.1 (\d+)")[1])
        metrics = int(job.wait_for_output(r"http://127\.0\.0\.1:(\d+)/metrics")[1])

        pids = {job.process.pid, *(process.pid for process in job.processes())}
        found = [
            connection.laddr
            for connection in psutil.net_connections("inet")
            if connection.pid in pids and connection.status == psutil.CONN_LISTEN
        ]

        (tmp_path / "enough").touch()
        assert job.wait() == 0, job.output
    assert {master, metrics} <= {address.port for address in found}
    assert [address for address in found if not ipaddress.ip_address(address.ip).is_loopback] == []
