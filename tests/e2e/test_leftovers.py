"""Processes that workers leave behind at the end of their program."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.harness import Job, finished, script, wait_for

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload", "json", "--nproc-per-node", "2")

# An upload: it reads and writes for some time, and says so on the inherited stdout.
UPLOAD = """
import os, subprocess, sys

if os.environ["RANK"] == "0":
    upload = '''
import time
for _ in range(100):
    open("uploaded", "ab").write(open("/dev/zero", "rb").read(20_000))
    time.sleep(0.05)
open("complete", "w")
print("the upload is complete", flush=True)
'''
    subprocess.Popen([sys.executable, "-c", upload, "s3://bucket"], start_new_session=True)
"""
SLEEPS = """
import os, subprocess, sys
if os.environ["RANK"] == "1":
    subprocess.Popen(["sleep", "600"])
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


def test_an_upload_that_a_successful_job_leaves_behind_ends_by_itself(tmp_path: Path) -> None:
    script(tmp_path, UPLOAD)

    job = finished(tmp_path, *LIGHT, "--children-grace", "4", "train.py")

    assert job.process.returncode == 0, job.stderr
    assert (tmp_path / "complete").exists(), job.stderr
    assert "[0] the upload is complete" in job.stdout
    assert re.search(r"still running: pid \d+ of rank 0 \(\S*python\S* -c .*\); waiting until they end", job.stderr)
    assert "ending" not in job.stderr


def test_a_child_that_does_nothing_is_named_and_ended_after_the_grace(tmp_path: Path) -> None:
    script(tmp_path, SLEEPS)

    begun_s = time.monotonic()
    job = finished(tmp_path, *LIGHT, "--children-grace", "1.5", "train.py", "0")

    assert job.process.returncode == 0, job.stderr
    assert time.monotonic() - begun_s >= 1.5
    ended = re.search(r"ending pid (\d+) of rank 1 \(sleep 600\): they were idle for the time", job.stderr)
    assert ended, job.stderr
    assert "sleep" not in _commands(int(ended[1]))


def _commands(pid: int) -> list[str]:
    """The arguments of a process; none if it has ended, also as a zombie."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def test_a_failed_job_waits_for_no_child(tmp_path: Path) -> None:
    script(tmp_path, SLEEPS)

    job = finished(tmp_path, *LIGHT, "--children-grace", "600", "--max-restarts", "0", "train.py", "1")

    assert job.process.returncode == 1, job.stderr
    assert "still running" not in job.stderr


def test_a_signal_ends_the_wait_and_the_exit_code_stays(tmp_path: Path) -> None:
    script(tmp_path, SLEEPS)

    with Job(tmp_path, *LIGHT, "--children-grace", "600", "train.py", "0") as job:
        wait_for(lambda: "still running" in job.stderr, "the sentence about the child")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 0

    assert re.search(r"ending pid \d+ of rank 1 \(sleep 600\): SIGINT", job.stderr), job.stderr
