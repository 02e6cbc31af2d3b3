"""What a call does while its job begins and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from elaunch.launcher.functions.launch import _Forwarding
from tests.harness import RUN_LIMIT_S


class Job:
    """Takes signals in place of a process."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, signum: int) -> None:
        self.got.append(signum)


@pytest.mark.parametrize("moment", range(6))
def test_a_signal_that_comes_while_the_job_begins_reaches_it_once(moment: int) -> None:
    """Another signal comes at each line of `begin` in turn."""
    lines: list[int] = []

    def at_line(frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_name != "begin":
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == moment:
                signal.raise_signal(signal.SIGURG)
        return at_line

    job: Any = Job()
    before = sys.gettrace()
    with _Forwarding(["SIGTERM", "SIGURG"]) as forwarding:
        signal.raise_signal(signal.SIGTERM)
        sys.settrace(at_line)
        try:
            forwarding.begin(job)
        finally:
            sys.settrace(before)
        if moment not in range(1, len(lines) + 1):
            signal.raise_signal(signal.SIGURG)

    assert Counter(job.got) == {signal.SIGTERM: 1, signal.SIGURG: 1}
    assert Counter(forwarding.seen) == Counter(job.got)


def test_in_the_background_of_a_script_sigint_reaches_the_job_and_under_nohup_sighup_does_not() -> None:
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with _Forwarding(["SIGINT", "SIGHUP"]) as forwarding:
            for number in numbers:
                signal.raise_signal(number)
        handlers = [signal.getsignal(number) for number in numbers]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    assert forwarding.seen == [signal.SIGINT]
    assert handlers == [signal.SIG_IGN, signal.SIG_IGN]


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
