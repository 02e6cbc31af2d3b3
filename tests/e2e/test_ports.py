"""Which ports a job on one node opens, and at which addresses."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import psutil
import pytest

from tests.harness import Job, script

pytestmark = pytest.mark.usefixtures("without_torch")

WAITS = """
import os, pathlib, time
print("rank", os.environ["RANK"], "at", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
while not pathlib.Path("enough").exists():
    time.sleep(0.05)
"""


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
