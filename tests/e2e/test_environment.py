"""The environment of a worker, compared with that of the real torchrun where torchrun sets the same variables."""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

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
    # torchrun imports torch. A variable that a new torch sets is found here alone; tests/conformance has a list.
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


def test_the_users_port_in_use_is_a_usage_error(tmp_path: Path) -> None:
    script(tmp_path, SAY_ENVIRONMENT)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = finished(tmp_path, *LIGHT, "--master-port", str(port), "train.py")

    assert job.code == 2, job.output
    assert f"port {port} is in use on 127.0.0.1" in job.stderr
    assert records(job, "found") == []


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
