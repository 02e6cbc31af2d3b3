"""What the command has imported when it starts the fork server: each module more is waited for by every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.harness import RUN_LIMIT_S

# Prints the modules that are loaded when the second process is started: the first is the guardian.
_COMMAND = """
import os, sys
started = []
def heard(event, args):
    if event == "subprocess.Popen":
        started.append(args)
        if len(started) == 2:
            sys.stdout.write(" ".join(sys.modules))
            sys.stdout.flush()
            os._exit(0)
sys.addaudithook(heard)
sys.argv = ["elaunch", "--nproc-per-node", "1", "script.py"]
from elaunch.launcher.cli import main
main()
"""
# They take from 1 to 30 ms.
_LATER = {
    "asyncio", "ctypes", "http", "logging", "multiprocessing", "psutil", "rich", "ssl", "tempfile", "torch",
    "yaml", "zipfile", "elaunch.agent.loop", "elaunch.launcher.store.connect",
    "elaunch.trainer",
}  # fmt: skip


def test_before_the_first_fork_the_command_imports_only_what_it_needs_until_then(tmp_path: Path) -> None:
    tmp_path.joinpath("script.py").write_text("print('a line')\n")

    done = subprocess.run(
        [sys.executable, "-c", _COMMAND],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=RUN_LIMIT_S,
    )

    loaded = set(done.stdout.split())
    assert "elaunch.agent.forkserver.client" in loaded, done.stderr
    assert sorted(loaded & _LATER) == []
    # Each of its own modules takes half a millisecond.
    assert len([name for name in loaded if name.startswith("elaunch")]) < 80
