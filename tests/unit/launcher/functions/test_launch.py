"""What a call does while its job begins and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from elaunch.launcher.functions.launch import _forwarded
from tests.harness import RUN_LIMIT_S


class Job:
    """Takes signals in place of a process."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, signum: int) -> None:
        self.got.append(signum)


def test_a_job_gets_the_signals_that_would_end_the_program_and_no_others() -> None:
    """In the background of a script SIGINT is ignored, and under nohup SIGHUP."""
    job: Any = Job()
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    seen: list[int] = []
    try:
        with _forwarded(job, ["SIGTERM", "SIGINT", "SIGHUP"], seen):
            for number in (signal.SIGTERM, *numbers):
                signal.raise_signal(number)
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, *numbers)]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    assert seen == job.got == [signal.SIGTERM, signal.SIGINT]
    assert handlers == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]


# Ctrl-C comes when elaunch's own modules are being imported.
INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "elaunch.launcher.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


def test_an_interrupted_job_that_has_not_begun_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)

    job = subprocess.run(
        [sys.executable, "-m", "elaunch.launcher.functions.job", str(os.getpid()), "train", "9", "", ""],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )

    assert (job.returncode, job.stdout, job.stderr) == (128 + signal.SIGINT, b"", b"")
