"""Habits of real scripts that a launcher may fail on."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import is_alive
from tests.harness import (
    COMMAND,
    DEADLINE_S,
    environment,
    finished,
    script,
    slow,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload", "json", "--max-restarts", "0")


@pytest.mark.parametrize("signums", [[signal.SIGTERM], slow([signal.SIGINT, signal.SIGINT])])
def test_a_reader_that_has_stopped_reading_does_not_keep_a_job_from_being_stopped(
    tmp_path: Path, signums: list[signal.Signals]
) -> None:
    script(tmp_path, "import os\nopen(f'up{os.environ[\"RANK\"]}', 'w')\nwhile True: print('x' * 100)\n")
    options = [*LIGHT, "--nproc-per-node", "2", "--stop-grace", "1", "train.py"]
    agent = subprocess.Popen(
        [*COMMAND, *options],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)), "two workers")
        children = psutil.Process(agent.pid).children(recursive=True)
        for signum in signums:
            agent.send_signal(signum)

        assert agent.wait(DEADLINE_S) == 128 + signums[0]
        wait_for(lambda: not any(map(is_alive, children)), "all gone")
    finally:
        agent.kill()
        agent.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        (["/dev/stdin"], "is not a regular file, so a restart could not read it again"),
        (
            ["--log-dir", "/proc/nope", "train.py"],
            "elaunch: --log-dir /proc/nope: no folder can be made in it (No such file or directory); choose another:"
            " --log-dir DIR\n",
        ),
    ],
)
def test_what_cannot_work_to_the_end_is_refused_at_the_start(tmp_path: Path, options: list[str], logged: str) -> None:
    script(tmp_path, "print('ran')\n")

    job = finished(tmp_path, *LIGHT, *options, stdin=subprocess.PIPE)

    assert job.code == 2
    assert logged in job.stderr
    assert job.stderr.count("\n") == 1
    assert job.stdout == ""
