"""bench.demo: what the user gets where it cannot go on, or may not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import is_alive
from tests.harness import REPOSITORY, environment


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_one_sentence_and_leaves_nothing(tmp_path: Path, signum: int) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bench.demo", "--steps", "36", "--out", str(out)]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        output = ""
        while "elaunch: generation 0" not in output:
            output += process.stdout.readline()
        below = psutil.Process(process.pid).children(recursive=True)

        # Ctrl-C reaches all of the terminal's processes.
        os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
        output += process.stdout.read()

    assert process.returncode == 128 + signum
    assert output.endswith(
        f"\ndemo: stopped by {signum.name}; nothing of it runs any more; {out} has what was done until then, and"
        " make demo begins again\n"
    )
    assert "Traceback" not in output
    assert re.findall(r"^elaunch: (SIG\w+): ", output, re.MULTILINE) == [signum.name], "the training gets it once"
    # Whatever the training has logged of its files is true afterwards.
    folders = re.findall(r"^elaunch: .*; output in (\S+)$", output, re.MULTILINE)
    assert folders
    assert all(Path(folder).is_dir() for folder in folders)
    assert [*filter(is_alive, below)] == []
    assert not (out / "report.html").exists()
