"""Times from the command to the first line of a script that imports torch: from a fork server that stayed, and else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.contenders import ELAUNCH, environment
from bench.job import SCRIPTS
from bench.samples import Sample

SECTION = "warm line"
WARM, PYTHON = "elaunch --warm", "python"
LINE = "first line"
# The same for both: a shell has elaunch in its PATH, and its interpreter is this one.
_COMMAND = (str(Path(sys.executable).with_name("elaunch")),)
_SCRIPT = str(SCRIPTS / "torch_line.py")


def turn() -> Iterator[Sample]:
    """A job that leaves a fork server behind, a job that starts from it, a job without it, and a bare interpreter."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        env = {**environment(os.environ, ELAUNCH, {}), "XDG_RUNTIME_DIR": folder}
        try:
            yield from _turn(env)
        finally:
            subprocess.run([*_COMMAND, "warm", "--stop"], env=env, stdout=subprocess.DEVNULL)


def _turn(env: Mapping[str, str]) -> Iterator[Sample]:
    _seconds((*_COMMAND, "--warm", _SCRIPT), SCRIPTS, env)
    for name, command in (
        (WARM, (*_COMMAND, "--warm")),
        (ELAUNCH.name, _COMMAND),
        (PYTHON, (sys.executable, "-u")),
    ):
        seconds = _seconds((*command, _SCRIPT), SCRIPTS, env)
        why = "" if seconds else "no line came"
        yield Sample(SECTION, name, 1, {LINE: seconds} if seconds else {}, why=why)


def _seconds(command: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> float | None:
    """The time (s) until the first line has been read; None if none came, or if a warm start was asked for in vain."""
    started_s = time.monotonic()
    seconds = None
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        assert job.stdout
        assert job.stderr
        for line in job.stdout:
            if b"first line" in line:
                seconds = time.monotonic() - started_s
        is_cold = b"cold start" in job.stderr.read()
    return None if is_cold else seconds
